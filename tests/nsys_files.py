"""SQLite files made to the schema that Nsight Systems documents for its exports."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

SCHEMA = """
CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL,
    correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL,
    shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER,
    registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL,
    gridZ INTEGER NOT NULL, blockX INTEGER NOT NULL, blockY INTEGER NOT NULL,
    blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL,
    dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL,
    localMemoryTotal INTEGER NOT NULL, gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER,
    graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, srcKind INTEGER,
    dstKind INTEGER, graphNodeId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, value INTEGER NOT NULL, bytes INTEGER NOT NULL, graphNodeId INTEGER,
    memKind INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (
    start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER,
    correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL,
    callchainId INTEGER);
CREATE TABLE NVTX_EVENTS (
    start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER,
    category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER,
    textId INTEGER, domainId INTEGER, uint64Value INTEGER);
CREATE TABLE TARGET_INFO_GPU (
    vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, busLocation TEXT, isDiscrete INTEGER,
    l2CacheSize INTEGER, totalMemory INTEGER, memoryBandwidth INTEGER, clockRate INTEGER,
    smCount INTEGER, uuid TEXT, chipName TEXT, cuDevice INTEGER, computeMajor INTEGER,
    computeMinor INTEGER, threadsPerWarp INTEGER, maxWarpsPerSm INTEGER, maxBlocksPerSm INTEGER,
    maxShmemPerSm INTEGER, maxRegistersPerSm INTEGER, maxShmemPerBlock INTEGER,
    maxShmemPerBlockOptin INTEGER);
CREATE TABLE ENUM_CUDA_MEMCPY_OPER (id INTEGER PRIMARY KEY, name TEXT, label TEXT);
"""
GRAPH_SCHEMA = """
CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (
    start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, streamId INTEGER NOT NULL, correlationId INTEGER,
    globalPid INTEGER, graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL);
"""


class Export:
    """A database under construction; `process` numbers become the identifiers' upper bits."""

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path)
        self.connection.executescript(SCHEMA)
        self._strings: dict[str, int] = {}

    def string(self, value: str) -> int:
        if value not in self._strings:
            self._strings[value] = len(self._strings) + 1
            self.insert("StringIds", id=self._strings[value], value=value)
        return self._strings[value]

    def insert(self, table: str, **values: object) -> None:
        columns = [row[1] for row in self.connection.execute(f"PRAGMA table_info({table})")]
        assert set(values) <= set(columns), (table, values)
        required = {
            row[1]: 0 for row in self.connection.execute(f"PRAGMA table_info({table})") if row[3]
        }
        row = required | values
        marks = ", ".join("?" * len(row))
        self.connection.execute(
            f"INSERT INTO {table} ({', '.join(map(repr, row))}) VALUES ({marks})",
            tuple(row.values()),
        )

    def kernel(
        self,
        name: str,
        start: int,
        end: int,
        *,
        correlation: int | None = None,
        process: int = 1,
        stream: int = 7,
        grid: Sequence[int] = (132, 1, 1),
        block: Sequence[int] = (128, 1, 1),
    ) -> None:
        sizes = {f"grid{axis}": size for axis, size in zip("XYZ", grid, strict=True)}
        sizes |= {f"block{axis}": size for axis, size in zip("XYZ", block, strict=True)}
        self.insert(
            "CUPTI_ACTIVITY_KIND_KERNEL",
            start=start,
            end=end,
            streamId=stream,
            correlationId=correlation,
            globalPid=process << 24,
            demangledName=self.string(name),
            shortName=self.string(name[:8]),
            registersPerThread=168,
            staticSharedMemory=1024,
            dynamicSharedMemory=100_000,
            **sizes,
        )

    def call(
        self,
        name: str,
        start: int,
        end: int,
        correlation: int,
        *,
        process: int = 1,
        thread: int = 5,
    ) -> None:
        self.insert(
            "CUPTI_ACTIVITY_KIND_RUNTIME",
            start=start,
            end=end,
            globalTid=(process << 24) | thread,
            correlationId=correlation,
            nameId=self.string(name),
        )

    def range(
        self,
        text: str,
        start: int,
        end: int | None,
        *,
        process: int = 1,
        thread: int = 5,
        registered: bool = False,
        kind: int = 59,
    ) -> None:
        self.insert(
            "NVTX_EVENTS",
            start=start,
            end=end,
            eventType=kind,
            globalTid=(process << 24) | thread,
            text=None if registered else text,
            textId=self.string(text) if registered else None,
        )

    def close(self) -> None:
        self.connection.commit()
        self.connection.close()
