from ..site.conftest import kept

__all__ = ["kept"]
