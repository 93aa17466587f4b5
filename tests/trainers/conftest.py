"""The same packs as in tests/integrations."""

from tests.integrations.conftest import image_packs, short_packs, text_packs

__all__ = ["image_packs", "short_packs", "text_packs"]
