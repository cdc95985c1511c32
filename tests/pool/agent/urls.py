"""The addresses that a node's machine uses, alone: these tests must not fail for another page's sake."""

from __future__ import annotations

from django.urls import include, path

from pool.web import agent_views

urlpatterns = [path("", include((agent_views.urlpatterns, "pool")))]
