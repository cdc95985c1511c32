"""The parts of the ``ui`` template library; ``portal.web.templatetags.ui`` gathers them."""
