"""A Spark sink in Python that discards its rows. It shows the minimum cost of any sink in Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from oncelog.spark.python_worker import freeze_modules

if TYPE_CHECKING:
    import pyarrow as pa


class Discarding(DataSource):  # type: ignore[misc]
    """A format whose streaming sink reads all rows of a task and writes none."""

    @classmethod
    def name(cls) -> str:
        return "discarding"  # as in spark_engine.FORMATS

    def streamWriter(self, schema: StructType, overwrite: bool) -> _Writer:
        freeze_modules()
        return _Writer()


class _Writer(DataSourceStreamArrowWriter):  # type: ignore[misc]
    """Exempts its modules from Spark's garbage collection, as Oncelog's sink does."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        freeze_modules()
        for _ in iterator:
            pass
        return WriterCommitMessage()

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        pass

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:
        pass
