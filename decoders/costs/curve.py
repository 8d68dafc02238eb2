"""Cost curves: measured seconds of a step by nodes, rows, context tokens and tier (compiled or not). Reads and writes their files."""

from __future__ import annotations

import bisect
import hashlib
import json
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..common.files import cache_folder, write_whole

#: Version of the file format; curves in files of another version are measured again.
VERSION = 1


class _Stored(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Subject(_Stored):
    """The combination of model, machine and versions that a curve is valid for.

    Attributes:
        model: class and sizes of the model; weights do not matter.
        dtype: dtype of the weights.
        quantization: description of quantization, inexact matrix products and tensor parallelism; "" if the model has none of these.
        device: name of the GPU; or name and instruction set of the processor, and the variant of the CPU kernels.
        threads: number of torch's intra-op threads; 0 on a GPU.
        attention: what computes attention: "sdpa", or the kernels "triton" or "cpu".
        torch, package: versions; package is "" in older files.
    """

    model: str
    dtype: str
    quantization: str
    device: str
    threads: int
    attention: str
    torch: str
    package: str = ""

    @property
    def key(self) -> str:
        """A short hash, for file names."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


class CostPoint(_Stored):
    """The measured duration of a step of one size.

    Attributes:
        rows: number of rows.
        context: number of tokens per row that attention reads.
        nodes: number of nodes of the block per row, root included.
        compiled: whether the step ran compiled.
        seconds: median duration of several steps: forward pass, verification and commit.
    """

    rows: int = Field(ge=1)
    context: int = Field(ge=1)
    nodes: int = Field(ge=1)
    compiled: bool
    seconds: float = Field(gt=0)

    @property
    def place(self) -> tuple[int, int, int, bool]:
        """The size of the step: rows, context, nodes and compiled."""
        return self.rows, self.context, self.nodes, self.compiled


class CostCurve(_Stored):
    """The measured points of one subject.

    Attributes:
        version: version of the file format.
        subject: model, machine and versions of the measurement.
        points: one point for each size, sorted by :attr:`CostPoint.place`.
    """

    version: int = Field(default=VERSION, ge=VERSION, le=VERSION)
    subject: Subject
    points: tuple[CostPoint, ...] = ()

    def with_points(self, points: Iterable[CostPoint]) -> CostCurve:
        """The curve with `points` added. A new point replaces an older point of the same size (:attr:`CostPoint.place`)."""
        merged = {point.place: point for point in (*self.points, *points)}
        return self.model_copy(update={"points": tuple(merged[place] for place in sorted(merged))})

    def context_near(self, rows: int, context: int, compiled: bool) -> int | None:
        """The context nearest to `context` among the points with these `rows` and `compiled`; None if there are no such points."""
        measured = {point.context for point in self.points if (point.rows, point.compiled) == (rows, compiled)}
        return min(measured, key=lambda length: (abs(length - context), length), default=None)

    def seconds(self, nodes: int, rows: int, context: int, compiled: bool) -> float:
        """Expected seconds of a step. Interpolates linearly between measured nodes and contexts, and extrapolates beyond the largest.

        If `rows` was not measured, uses the nearest measured number of rows, with the same total number of nodes. If only compiled
        steps were measured, or only uncompiled steps, these points are used for both.

        Raises:
            ValueError: the curve has no points.
        """
        points = self._nearest(rows, compiled)
        nearest = points[0].rows
        by_context: dict[int, list[tuple[float, float]]] = {}
        for p in points:
            by_context.setdefault(p.context, []).append((p.nodes, p.seconds))
        # The total number of nodes determines the cost: many rows of few nodes cost as much as few rows of many nodes.
        same_work = nodes * rows / nearest
        by_length = [(float(c), interpolated(sorted(line), same_work)) for c, line in sorted(by_context.items())]
        return interpolated(by_length, context)

    def most_nodes(self, rows: int, compiled: bool) -> int:
        """The largest measured number of nodes, converted to nodes per row for `rows` rows. Raises ValueError without points."""
        return max(max(p.nodes * p.rows // rows for p in self._nearest(rows, compiled)), 1)

    def _nearest(self, rows: int, compiled: bool) -> list[CostPoint]:
        """The points at the measured number of rows nearest to `rows`: only points with this `compiled`, if there are any."""
        points = [p for p in self.points if p.compiled == compiled] or list(self.points)
        if not points:
            raise ValueError("this cost curve holds no points: measure some with decoders.calibrate")
        nearest = min({p.rows for p in points}, key=lambda count: (abs(count - rows), count))
        return [p for p in points if p.rows == nearest]


def interpolated(line: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolates linearly between points ``(x, y)``, which are sorted by x. To the left of all points,
    returns the y of the first point. To the right of all points, extrapolates, but to no less than the y of the last point.
    """
    if len(line) == 1 or x <= line[0][0]:
        return line[0][1]
    right = min(bisect.bisect_left(line, (x, float("-inf"))), len(line) - 1)
    (x0, y0), (x1, y1) = line[right - 1], line[right]
    y = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return y if x <= x1 else max(y, y1)


SUFFIX = ".costs.json"


def default_folder() -> Path:
    """``hf-decoders/costs`` in the user's cache folder."""
    return cache_folder() / "costs"


def path_of(folder: Path, subject: Subject) -> Path:
    """The file that stores the curve of `subject`."""
    return folder / (subject.key + SUFFIX)


def read(folder: Path, subject: Subject) -> CostCurve | None:
    """The stored curve of `subject`; None if there is no file of this format version, or (with a warning) if the file is damaged."""
    path = path_of(folder, subject)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        warnings.warn(f"the measured costs in {path} cannot be read and are measured again: {error}", stacklevel=2)
        return None
    try:
        content = json.loads(text)
        if isinstance(content, dict) and content.get("version") != VERSION:
            return None
        curve = CostCurve.model_validate(content)
        if curve.subject != subject:
            raise ValueError("the file belongs to another model or machine")
    except (ValueError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        warnings.warn(f"the measured costs in {path} are damaged and are measured again: {reason}", stacklevel=2)
        return None
    return curve


def write(folder: Path, curve: CostCurve) -> Path | None:
    """Stores `curve`, merged with the points in the file. Returns the file's path; None, with a warning, if writing fails."""
    path = path_of(folder, curve.subject)
    try:
        kept = read(folder, curve.subject) if path.exists() else None
        whole = kept.with_points(curve.points) if kept is not None else curve
        write_whole(path, (whole.model_dump_json(indent=1) + "\n").encode())
    except OSError as error:
        warnings.warn(f"the measured costs could not be saved as {path}: {error}", stacklevel=2)
        return None
    return path
