"""Pages of the documentation whose programs need Spark."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.support.pages import name_of, pages_that_need, run_here, run_page


@pytest.mark.parametrize("page", pages_that_need("spark"), ids=name_of)
def test_a_page_shows_what_its_programs_print(
    page: Path, spark: SparkSession, tmp_path: Path
) -> None:
    run_page(page, tmp_path, run=run_here)
