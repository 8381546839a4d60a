"""Java from PyPI, and the line of a Spark error that matters."""

import subprocess
from pathlib import Path

from holdfast.spark.session import _java_shim, cause


def test_the_java_shim_leaves_out_only_the_module_that_the_jre_lacks(tmp_path: Path) -> None:
    real = tmp_path / "real java"
    real.write_text('#!/bin/sh\nfor a in "$@"; do echo "[$a]"; done\n')
    real.chmod(0o755)
    home = _java_shim(real, tmp_path)
    arguments = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "--add-modules=x", "", "Main"]
    said = subprocess.run([home / "bin" / "java", *arguments], capture_output=True, text=True)
    assert said.stdout.split("\n")[:-1] == ["[-cp]", "[a b]", "[--add-modules=x]", "[]", "[Main]"]


def test_the_cause_of_a_python_error_is_found_under_sparks_stack() -> None:
    text = (
        "Job aborted: Traceback (most recent call last):\n"
        '  File "worker.py", line 1, in main\n'
        "    process()\n"
        "ModuleNotFoundError: No module named 'numpy'\n"
        " SQLSTATE: 38000\n\tat org.apache.spark.Foo(Foo.scala:1)"
    )
    assert cause(Exception(text)) == "ModuleNotFoundError: No module named 'numpy'"
    assert cause(Exception("first\nsecond")) == "first"


def test_the_cause_is_found_if_the_daemon_does_not_start() -> None:
    """As on executors that have no Holdfast, with ``spark.python.daemon.module`` set."""
    text = (
        "An error occurred while calling z:PythonRDD.collectAndServe.\n"
        ": org.apache.spark.SparkException: Job aborted: Lost task 0.3 (executor 0): "
        "org.apache.spark.SparkException: \n"
        "Error from python worker:\n"
        "  ./env/bin/python: Error while finding module specification for "
        "'holdfast.spark.daemon' (ModuleNotFoundError: No module named 'holdfast')\n"
        "PYTHONPATH was:\n  pyspark.zip\n"
    )
    assert cause(Exception(text)).endswith("(ModuleNotFoundError: No module named 'holdfast')")
