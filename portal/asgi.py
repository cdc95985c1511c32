"""ASGI: pages and API by Django, sockets by Channels."""

from __future__ import annotations

import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")

from django.core.asgi import get_asgi_application

import portal.celery  # noqa: F401  (shared tasks find their application)

django_application = get_asgi_application()

from channels.routing import ProtocolTypeRouter  # noqa: E402

from portal.sockets import websocket_application  # noqa: E402
from portal.web.checks import refuse_insecure  # noqa: E402

refuse_insecure()
application = ProtocolTypeRouter({"http": django_application, "websocket": websocket_application})
