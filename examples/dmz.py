"""The network-monitoring flow of the papers, on made-up packets.

holdfast run examples/dmz.py --sites 2 --seconds 10
spark-submit --master 'local[4]' examples/dmz.py

Prints the groups whose worst session was very long. The other statistics are counted.
"""

from holdfast import Flow, col, sinks, sources
from holdfast import functions as F
from holdfast.lab.workloads.dmz import SCHEMA, DmzRows

flow = Flow("dmz")
packets = flow.source(
    "packets", sources.generator(DmzRows(splits=2), SCHEMA, rate=100_000, splits=2)
)
sessions = packets.key_by("src", "dst").spans(
    start=col("kind") == 0,
    end=col("kind") == 1,
    emit={"app": col("dst") % 10, "src": col("src"), "dur": col("ts") - F.at_start("ts")},
)
windows = sessions.key_by("app", "src", name="windows").window(rows=100, every=10)
stats = windows.agg(worst=F.max("dur"), typical=F.mean("dur"))
stats.sink("stats", sinks.discard())
stats.filter(col("worst") > 199_000).sink("alerts", sinks.console())

if __name__ == "__main__":
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.appName("dmz").getOrCreate()
    with flow.start(spark, sites=2) as run:
        run.wait(timeout=10)
    print(run.sink_report("stats"))
    spark.stop()
