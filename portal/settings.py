"""Typed settings, all from the environment (docs/operations.md lists the variables).

Development and test have workable defaults; production refuses insecure ones by system checks
(portal/web/checks.py).
"""

from __future__ import annotations

import os
import urllib.parse
from pathlib import Path

import environ
from django.utils.translation import gettext_lazy as _

BASE_DIR = Path(__file__).resolve().parent.parent
env = environ.Env()

GPUPOOL_ENV = env.str("GPUPOOL_ENV", "development")
GPUPOOL_VERSION = "0.1.0"
GPUPOOL_DEMO = env.bool("GPUPOOL_DEMO", False)
GPUPOOL_DATA_DIR = Path(env.str("GPUPOOL_DATA_DIR", str(BASE_DIR / "data")))
GPUPOOL_BASE_URL = env.str("GPUPOOL_BASE_URL", "http://127.0.0.1:8000").rstrip("/")
GPUPOOL_BILLING_TIME_ZONE = env.str("GPUPOOL_BILLING_TIME_ZONE", "Asia/Shanghai")
GPUPOOL_CURRENCY = env.str("GPUPOOL_CURRENCY", "CNY")
GPUPOOL_ORGANISATION = env.str("GPUPOOL_ORGANISATION", "Qinghe Research" if GPUPOOL_DEMO else "")
# Telemetry kept: raw samples, rollups by minute and by hour, in days (daily ones stay)
GPUPOOL_RAW_DAYS = env.int("GPUPOOL_RAW_DAYS", 7)
GPUPOOL_MINUTE_DAYS = env.int("GPUPOOL_MINUTE_DAYS", 14)
GPUPOOL_HOUR_DAYS = env.int("GPUPOOL_HOUR_DAYS", 400)
GPUPOOL_METRICS_TOKEN = env.str("GPUPOOL_METRICS_TOKEN", "")
# Checkpoint addresses inside the network that may be called: host names, ".suffix", networks
GPUPOOL_HOOK_ALLOW = env.list("GPUPOOL_HOOK_ALLOW", default=[])
GPUPOOL_STATUS_FILE = env.str("GPUPOOL_STATUS_FILE", str(GPUPOOL_DATA_DIR / "status.json"))

INSECURE_KEY = "insecure-development-key-never-for-production-0123456789abcdef"
SECRET_KEY = env.str("GPUPOOL_SECRET_KEY", INSECURE_KEY if GPUPOOL_ENV != "production" else "")
DEBUG = env.bool("GPUPOOL_DEBUG", False)

_base = urllib.parse.urlsplit(GPUPOOL_BASE_URL)
ALLOWED_HOSTS = env.list("GPUPOOL_ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]", "testserver"])
if _base.hostname and _base.hostname not in ALLOWED_HOSTS:
    ALLOWED_HOSTS.append(_base.hostname)
CSRF_TRUSTED_ORIGINS = [f"{_base.scheme}://{_base.netloc}"]
FORCE_SCRIPT_NAME = _base.path or None
_cookie_path = (_base.path or "") + "/"

INSTALLED_APPS = [
    "portal.web",
    "monitoring",
    "pool",
    "quotas",
    "portal.notify",
    "portal.accounts",
    "portal.ops",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.postgres",
    "django.contrib.staticfiles",
    "axes",
    "channels",
    "csp",
    "django_filters",
    "django_htmx",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "rest_framework",
    "tree_queries",
]

MIDDLEWARE = [
    "django.middleware.gzip.GZipMiddleware",  # a cold page with its styles and scripts is some 50 kB instead of 180
    "django.middleware.security.SecurityMiddleware",
    "portal.web.static.StaticFiles",
    "portal.ops.middleware.RequestIdMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "csp.middleware.CSPMiddleware",
    "portal.web.middleware.PlainTextMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "portal.accounts.middleware.PersonMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "django_htmx.middleware.HtmxMiddleware",
    "portal.web.middleware.DomainErrorMiddleware",
    "axes.middleware.AxesMiddleware",
]

ROOT_URLCONF = "portal.urls"
ASGI_APPLICATION = "portal.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "django.template.context_processors.i18n",
                "django.template.context_processors.tz",
                "csp.context_processors.nonce",
                "portal.web.nav.navigation",
            ],
        },
    }
]

FORM_RENDERER = "portal.web.form_renderer.Renderer"

# Database and Redis -------------------------------------------------------------------------------------

DATABASES = {"default": env.db_url("DATABASE_URL", default="postgres://postgres@127.0.0.1:5432/gpupool")}
DATABASES["default"]["CONN_MAX_AGE"] = 0
DATABASES["default"]["CONN_HEALTH_CHECKS"] = True
_options = DATABASES["default"].setdefault("OPTIONS", {})
_session = (
    "-c gpupool.allow_truncate=on " if GPUPOOL_ENV == "test" else ""
)  # tests empty tables between cases
_options.setdefault(
    "options", _session + "-c lock_timeout=10s -c idle_in_transaction_session_timeout=60s -c jit=off"
)
if env.bool("GPUPOOL_DATABASE_POOL", GPUPOOL_ENV != "test"):
    _options["pool"] = {"min_size": 1, "max_size": env.int("GPUPOOL_DATABASE_POOL_SIZE", 16), "timeout": 10}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

REDIS_URL = env.str("REDIS_URL", "redis://127.0.0.1:6379/0")


def _celery_url(url: str) -> str:
    """Celery spells unix sockets as redis+socket://path?virtual_host=N."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "unix":
        number = urllib.parse.parse_qs(parts.query).get("db", ["0"])[0]
        return f"redis+socket://{parts.path}?virtual_host={number}"
    return url


CACHES = {
    "default": {
        "BACKEND": "django.core.cache.backends.redis.RedisCache",
        "LOCATION": REDIS_URL,
        "KEY_PREFIX": "gpupool",
    }
}
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.core.RedisChannelLayer",
        "CONFIG": {
            # redis-py closes idle sockets after 5 s by default, which would close every idle WebSocket.
            "hosts": [{"address": REDIS_URL, "socket_timeout": None, "max_connections": 20000}],
            "prefix": "gpupool",
        },
    }
}

# Celery -------------------------------------------------------------------------------------------------

CELERY_BROKER_URL = _celery_url(REDIS_URL)
CELERY_RESULT_BACKEND = None
CELERY_TASK_IGNORE_RESULT = True
CELERY_TASK_ACKS_LATE = True
CELERY_TASK_REJECT_ON_WORKER_LOST = True
CELERY_WORKER_PREFETCH_MULTIPLIER = 1
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": 3600, "global_keyprefix": "gpupool:"}
CELERY_TASK_DEFAULT_QUEUE = "execute"
CELERY_TIMEZONE = "UTC"
CELERY_TASK_ALWAYS_EAGER = env.bool("GPUPOOL_TASKS_EAGER", GPUPOOL_ENV == "test")
CELERY_TASK_EAGER_PROPAGATES = True
CELERY_BEAT_SCHEDULE = {
    "deliver-outbox": {"task": "portal.ops.deliver_outbox", "schedule": 5.0},
    "deliver-notices": {"task": "portal.notify.deliver", "schedule": 10.0},
    "tidy": {"task": "portal.ops.tidy", "schedule": 3600.0},
    "schedule-cycle": {"task": "pool.schedule_cycle", "schedule": 10.0},
    "tidy-uploads": {"task": "pool.tidy_uploads", "schedule": 3600.0},
    "tidy-decisions": {"task": "pool.tidy_decisions", "schedule": 3600.0},
    "sweep-leases": {"task": "pool.sweep_leases", "schedule": 10.0},
    "sweep-windows": {"task": "pool.sweep_windows", "schedule": 10.0},
    "judge-idle": {"task": "monitoring.judge_idle", "schedule": 60.0},
    "sweep-nodes": {"task": "pool.sweep_nodes", "schedule": 5.0},
    "poll-clusters": {"task": "pool.poll_clusters", "schedule": 1.0, "options": {"expires": 1.0}},
    "compare-accounts": {"task": "pool.compare_accounts", "schedule": 3600.0},
    "retry-starts": {"task": "pool.reconcile_execution", "schedule": 10.0},
    "sweep-approvals": {"task": "quotas.sweep_approvals", "schedule": 60.0},
    "sweep-queue": {"task": "quotas.sweep_queue", "schedule": 30.0},
    "accrue-ledger": {"task": "quotas.accrue_ledger", "schedule": 300.0},
    "reconcile": {"task": "quotas.reconcile", "schedule": 3600.0},
    "day-sums": {"task": "monitoring.day_sums", "schedule": 600.0},
    "send-reports": {"task": "monitoring.send_reports", "schedule": 300.0},
    "watch-budgets": {"task": "quotas.watch_budgets", "schedule": 600.0},
    "rollup": {"task": "monitoring.rollup", "schedule": 60.0},
    "scrape-sources": {"task": "monitoring.scrape_due", "schedule": 5.0, "options": {"expires": 5.0}},
    "partitions": {"task": "monitoring.partitions", "schedule": 3600.0},
    "watch": {"task": "monitoring.watch", "schedule": 60.0},
    "judge-health": {"task": "monitoring.judge_health", "schedule": 60.0},
    "evaluate-alerts": {"task": "monitoring.evaluate_alerts", "schedule": 30.0},
    "find-waste": {"task": "monitoring.find_waste", "schedule": 300.0},
    "waste-digest": {"task": "monitoring.waste_digest", "schedule": 1800.0},
}

GPUPOOL_DECISIONS_DAYS = env.int("GPUPOOL_DECISIONS_DAYS", 14)  # so long decisions can be replayed

# People -------------------------------------------------------------------------------------------------

AUTH_USER_MODEL = "accounts.User"
AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesStandaloneBackend",
    "django.contrib.auth.backends.ModelBackend",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator", "OPTIONS": {"min_length": 10}},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.NumericPasswordValidator"},
]
if GPUPOOL_ENV == "test":  # tests sign in thousands of times; strength is Django's own affair
    PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
LOGIN_URL = "accounts:login"
LOGIN_REDIRECT_URL = "home"
LOGOUT_REDIRECT_URL = "accounts:login"
SESSION_ENGINE = "django.contrib.sessions.backends.db"
SESSION_COOKIE_AGE = 12 * 3600
SESSION_COOKIE_NAME = "gpupool_session"
SESSION_COOKIE_PATH = CSRF_COOKIE_PATH = LANGUAGE_COOKIE_PATH = _cookie_path
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
CSRF_COOKIE_NAME = "gpupool_csrf"
CSRF_FAILURE_VIEW = "portal.web.views.csrf_failure"
AXES_FAILURE_LIMIT = 8
AXES_COOLOFF_TIME = 0.25  # hours
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_LOCKOUT_CALLABLE = "portal.accounts.web.views.locked_out"
AXES_RESET_ON_SUCCESS = True
AXES_VERBOSE = False
AXES_ENABLED = env.bool("GPUPOOL_AXES", True)

# Languages and time -------------------------------------------------------------------------------------

LANGUAGE_CODE = env.str("GPUPOOL_LANGUAGE", "en")
LANGUAGES = [("zh-hans", _("简体中文")), ("en", _("English"))]
LOCALE_PATHS = [BASE_DIR / "locale" / room for room in ("portal", "quotas", "pool", "monitoring")]
USE_I18N = USE_TZ = True
TIME_ZONE = "UTC"
USE_THOUSAND_SEPARATOR = False

# Security -----------------------------------------------------------------------------------------------

_https = _base.scheme == "https"
SECURE_PROXY_SSL_HEADER = (
    ("HTTP_X_FORWARDED_PROTO", "https") if env.bool("GPUPOOL_BEHIND_PROXY", False) else None
)
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _https
SECURE_HSTS_SECONDS = 31536000 if _https else 0
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_CROSS_ORIGIN_OPENER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'none'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "style-src-attr": ["'unsafe-inline'"],  # custom properties on elements; plotly sets element styles
        "img-src": ["'self'", "data:", "blob:"],
        "font-src": ["'self'"],
        "connect-src": ["'self'"],
        "form-action": ["'self'"],
        "frame-ancestors": ["'none'"],
        "base-uri": ["'none'"],
        "manifest-src": ["'self'"],
    }
}
DATA_UPLOAD_MAX_MEMORY_SIZE = 5 * 1024 * 1024
FILE_UPLOAD_MAX_MEMORY_SIZE = 5 * 1024 * 1024

# Static files: served by the installation itself, nothing is fetched from elsewhere --------------------

STATIC_URL = "static/"
STATIC_ROOT = GPUPOOL_DATA_DIR / "static"
STATICFILES_DIRS = [BASE_DIR / "static"]
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "portal.web.static.MarkedStorage"},
}
WHITENOISE_USE_FINDERS = env.bool("GPUPOOL_STATIC_FROM_SOURCE", True)
WHITENOISE_AUTOREFRESH = GPUPOOL_ENV == "development"
MEDIA_ROOT = GPUPOOL_DATA_DIR / "media"

# API ----------------------------------------------------------------------------------------------------

REST_FRAMEWORK = {
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "portal.accounts.api.auth.TokenAuthentication",
        "rest_framework.authentication.SessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["portal.accounts.api.auth.TokenScope"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser", "rest_framework.parsers.MultiPartParser"],
    "DEFAULT_PAGINATION_CLASS": "portal.kernel.api.Pages",
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "EXCEPTION_HANDLER": "portal.kernel.api.problem_handler",
    "DEFAULT_THROTTLE_CLASSES": [
        "rest_framework.throttling.UserRateThrottle",
        "rest_framework.throttling.AnonRateThrottle",
    ],
    "DEFAULT_THROTTLE_RATES": {
        "user": env.str("GPUPOOL_API_RATE", "1200/min" if GPUPOOL_ENV != "test" else "1000000/min"),
        "anon": "60/min" if GPUPOOL_ENV != "test" else "1000000/min",
    },
    "TEST_REQUEST_DEFAULT_FORMAT": "json",
    "UNAUTHENTICATED_USER": "django.contrib.auth.models.AnonymousUser",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "GPU pool portal",
    "DESCRIPTION": "Everything a page can do. Errors are application/problem+json with a stable `code`.",
    "VERSION": "1",
    "SERVE_INCLUDE_SCHEMA": False,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "REDOC_DIST": "SIDECAR",
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "COMPONENT_SPLIT_REQUEST": True,
    "ENUM_NAME_OVERRIDES": {
        "IncidentStateEnum": "portal.ops.models.Incident.State",
        "RequestStateEnum": "quotas.models.CapacityRequest.State",
        "AllocationStateEnum": "pool.models.Allocation.State",
    },
}

# Mail and logs ------------------------------------------------------------------------------------------

vars().update(env.email_url("GPUPOOL_EMAIL_URL", default="consolemail://"))
DEFAULT_FROM_EMAIL = env.str("GPUPOOL_MAIL_FROM", "gpu-pool@localhost")
EMAIL_TIMEOUT = 10
GPUPOOL_MAIL = env.bool("GPUPOOL_MAIL", "GPUPOOL_EMAIL_URL" in os.environ or GPUPOOL_ENV == "test")

LOG_LEVEL = env.str("GPUPOOL_LOG_LEVEL", "INFO")
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "root": {"handlers": ["console"], "level": LOG_LEVEL if GPUPOOL_ENV != "test" else "WARNING"},
    "loggers": {"django.request": {"level": "ERROR"}, "axes": {"level": "WARNING"}},
}
SILENCED_SYSTEM_CHECKS = ["axes.W006"]
