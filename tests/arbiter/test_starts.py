"""Entries of earlier starts of a flow, in a directory."""

from pathlib import Path

import pytest

from tests.support.starts_contract import StartsContract


class TestFileStarts(StartsContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"file:{tmp_path}"
