"""The problems of losses: cross-entropies of scores, and of those of a chunk of rows at a time."""

from __future__ import annotations

from dataclasses import dataclass

from onnx_fuse.program.problem import ITEMSIZE, AnyProblem


@dataclass(frozen=True)
class CrossEntropy(AnyProblem):
    """-weight[t] log p[t] for each of `rows` rows of x [batch, classes, inner], t its label.

    `stage` "rows": to "loss", or with its weight to "rows"; "total": their sum, or their mean;
    "grad": dx = slope (softmax(x) - [class is the label]). `log_softmax`: x are logits.
    """

    stage: str
    rows: int
    classes: int
    inner: int
    dtype: str
    labels: str
    ignored: int | None = None
    log_softmax: bool = True
    mean: bool = False

    @property
    def bytes(self) -> int:
        """x read; written too by the gradient."""
        if self.stage == "total":
            return 8 * self.rows
        tensors = 2 if self.stage == "grad" else 1
        return tensors * self.rows * self.classes * ITEMSIZE[self.dtype]

    @property
    def empty(self) -> bool:
        """Whether there is no row; the total of none is a number."""
        return not self.rows and self.stage != "total"


@dataclass(frozen=True)
class CrossEntropyChunk(AnyProblem):
    """The cross-entropy of a chunk of `rows` rows of scores "x", `stride` elements apart.

    "rows" [rows, 2] takes each row's loss and the weight of its label. With `gradient`, what
    d loss / d x is takes the place of x, with zeros from column `classes` on.
    """

    moves = "x: dtype rows stride; dx: dtype rows stride gradient"
    rows: int
    classes: int
    stride: int
    dtype: str
    labels: str
    weights: str = "float32"
    ignored: int = -100
    smoothing: float = 0.0
    gradient: bool = False


@dataclass(frozen=True)
class LabelScore(AnyProblem):
    """A reference near the top of each row, from its label's score x · Wᵀ (+ bias): "to" [rows].

    x [rows, k] and W [classes, k], or [k, classes] if `turned`, have rows `ldx` and `ldw` elements
    apart. The reference is 64 above the score, in units of log 2; inf where the label is `ignored`
    or no class, 0 where its score is of no use. Pointers: x w bias target to.
    """

    moves = "x w: dtype rows k"
    rows: int
    k: int
    classes: int
    ldx: int
    ldw: int
    dtype: str
    labels: str
    ignored: int = -100
    turned: bool = False


@dataclass(frozen=True)
class ExpRows(AnyProblem):
    """The cross-entropy of rows whose product has stored e = exp(score - reference) already.

    "e" [rows, classes], rows `stride` elements apart, and "part" [parts, rows], its sums, come from
    a product with the epilogue `exp`. With S a row's sum and w its label's weight, "rows" [rows, 2]
    takes the loss and w, "scale" [rows] w / S, and e - S takes the place of a label's e: d loss / d
    score is scale times e then. "scaled" [rows, k] takes scale times x, and "narrow", where it is
    given, scale in x's type. Rows whose scores were too far from their reference are made anew.
    Pointers: e part x w bias target weight rows scale narrow scaled; LabelScore describes x, w and
    `turned`.
    """

    moves = "part: float32 parts rows; x scaled: dtype rows k"
    rows: int
    k: int
    classes: int
    stride: int
    parts: int
    ldx: int
    ldw: int
    dtype: str
    labels: str
    weights: str = "float32"
    ignored: int = -100
    turned: bool = False
    scaled: bool = True
    """Whether "scaled" is written."""
