from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """People and their authority."""

    name = "portal.accounts"
    label = "accounts"
    verbose_name = "People"
