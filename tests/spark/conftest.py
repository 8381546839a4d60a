"""One quiet Spark session for all tests that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from holdfast.spark.session import hosting_session


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    # Spark's Python workers see the environment, not the driver's sys.path.
    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    conf = {
        # Slots for sites and for what feeds them. A task that fails is not tried again.
        "spark.master": "local[6]",
        "spark.default.parallelism": "2",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
    }
    session = hosting_session("holdfast tests", 6, **conf)
    yield session
    session.stop()
