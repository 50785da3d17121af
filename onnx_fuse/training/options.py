"""The options of training, each declared once as `onnx_fuse.options` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from onnx_fuse.errors import UsageError
from onnx_fuse.options import shared

if TYPE_CHECKING:
    import os

    from onnx_fuse.ir.constants import Model
    from onnx_fuse.program.problem import Hardware
    from onnx_fuse.training.adapters import Lora
    from onnx_fuse.training.losses import Given, Term
    from onnx_fuse.training.optim import Optimizer


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What the graph of a training step depends on."""

    TEXTS: ClassVar = """
        loss (--loss NAME): Minimize this loss: cross_entropy, nll, softmax_focal, multi_margin,
            mse, l1, huber, bce_with_logits, focal, dice, hinge, kl_div, poisson_nll,
            cosine_embedding, triplet, contrastive, ctc, a scalar output, or an .onnx file that
            computes it. | A named one compares an output with the input "labels", or outputs with
            each other. An ONNX model or function is a loss, too, as
            `training.losses.Term` says; a list of Term is several.
        optimizer: An optimizer of `onnx_fuse.optim`, or its name; the default is AdamW().
        loss_options: Options of a named loss, such as ignore_index, label_smoothing, weight or
            reduction, with PyTorch's meanings; docs/training.md has a table of them.
        output (--logits NAME): Compute the loss from this output, not from the first.
        trainable (--trainable GLOB): Train these weights. The default is all. | Globs over the
            names of float initializers; all are those that have an axis and reach the loss.
        frozen (--freeze GLOB): Do not train these weights. | Globs over the names of initializers.
        clip_norm (--clip-norm): Limit the norm of all gradients together.
        accumulate (--accumulate, 1 or more): Update once in this many steps. | It takes their mean
            gradient. A batch that is split in another way has other last bits, since float sums
            over its rows depend on their order; the same split has the same bits.
        precision (--precision NAME): Compute in this precision: fp32, tf32, bf16x3, bf16x6, bf16,
            fp16 or, on a Hopper GPU, fp8; on the CPU fp32 or fp16. | With "bf16" and "fp16",
            forward and backward are in 16 bits, and weights, sums and the update are in float32
            (onnxruntime's CPU rounds nothing between operators: its losses in "fp16" are "fp32"'s).
            "fp16" scales the loss, and skips updates whose gradients overflow. "fp8" is "bf16" with
            multiplications by weights in float8, if their sizes, rows included, are multiples of
            16: operands in e4m3, gradients in e5m2, scaled by the largest magnitudes of the last 16
            steps.
        loss_scale: The first scale of the loss in "fp16".
        ema (--ema DECAY): Keep running averages of the weights, which decay by this factor at an
            update (0.999), and evaluate and write them. | `evaluate`, `weights` and `save` take
            them where they are asked to.
        free_batch (--free-batch): Train with another batch size than MODEL's fixed one. | The first
            batch proves that the results stay those of the original, row by row.
        level (--level, 0 to 3): Fuse up to this level. The default is 2 on a GPU in 16 bits, and
            otherwise 0. | That was measured to be 5 to 20 % faster.
        """
    loss: Given | Sequence[Term]
    optimizer: Optimizer | str | None = None
    loss_options: Mapping[str, Any] | None = None
    output: str | None = None
    trainable: Sequence[str] | None = None
    frozen: Sequence[str] = ()
    clip_norm: float | None = None
    accumulate: int = 1
    precision: str = "fp32"
    loss_scale: float = 65536.0
    ema: float | None = None
    free_batch: bool = False
    level: int | None = None

    def of_step(self) -> dict[str, Any]:
        """The values of these options by name, without those that a subclass adds."""
        return shared(StepOptions, self)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(StepOptions):
    """All options of a Trainer. Raises UsageError for a number out of its range."""

    TEXTS: ClassVar = """
        teacher (--teacher FILE): Distill this model: add to the loss how far the outputs are from
            its outputs. Its weights do not change. | A path, bytes, ModelProto or onnx_ir.Model,
            whose inputs have the names of the model's. It runs in the same step.
        distill: {output: weight} of the outputs that are compared. The default is the first that
            both have, with weight 1.
        temperature (--temperature T): Divide scores by T before the teacher's probabilities are
            compared. The default is 2. | The loss is T² times the Kullback-Leibler divergence, the
            mean over rows. None compares outputs by their squared difference.
        seed (--seed, 0 or more): Seed the order of the data and Dropout.
        lora: Low-rank adapters, which train in place of the weights that they are beside, together
            with what `trainable` matches. `save` writes the sum of both. Several by name train at
            once: the feed "adapter" then names the adapter of each row of a batch, or None, and
            each one gets the update that it would get alone from its rows (docs/training.md).
        tie (--tie): Train a weight that the file stores twice as one.
        untie (--untie): Give each node its own weight where several read one of equal entries.
        shapes: Shapes by input, fixed in training but not in what `save` writes.
        dims: Sizes by symbol, fixed in the same way.
        device: "cpu" trains on onnxruntime, "cuda" on this package's kernels, "cuda:1" on GPU 1.
        device_id: The number of the GPU. The default is 0, and of several ranks each one's number
            on its machine.
        threads (--threads, 0 or more): Run an operator on this many threads of the CPU. The default
            is one for each core. | 0 is the default, too.
        memory (--memory SIZE): Keep a step within this much GPU memory, such as 6GiB, by computing
            results a second time in the backward; min asks for the least possible. | A number is
            bytes. Weights, states, inputs and temporaries count; the bits stay the same.
        compiled (--compiled DIR): Run the steps that onnx-fuse compile --train has written to this
            folder, from the same MODEL and options, on a GPU. | `deploy.compile_training` writes
            them, too. Nothing is compiled then.
        hardware: Build the steps for this GPU, which need not be here: nothing is run, and
            `deploy.compile_training` compiles them.
        distributed: Train together with the other processes of a run (ranks), which torchrun,
            mpirun, srun or `onnx-fuse train --gpus` have started. Each gives `step` its part of the
            batch; the loss and the update are those of all parts together. A number is that of the
            ranks, which steps that are compiled with `hardware` need.
        reduce_dtype (--reduce NAME): Add up the gradients of several GPUs in fp32 or bf16. | "fp32"
            stands for their own type.
        shard (--shard NAME): Let each GPU hold only a part: of the optimizer's states with
            optimizer, and of the weights, too, with all, which takes the least memory. | The
            weights are gathered once a step, or with "all" for the forward and the backward. All
            ranks then call what reads weights (`evaluate`, `weights`, `save`) together.
        pack (--pack): Compute on a GPU only the tokens, not the padding that the model's attention
            mask hides. | Labels at the padding must be the ignored one. A batch that cannot be
            packed is computed with its padding, with one warning (docs/padding.md).
        sync_batchnorm (--sync-batchnorm): Normalize batches by the statistics of all GPUs' rows.
        """
    teacher: Model | None = None
    distill: Mapping[str, float] | None = None
    temperature: float | None = 2.0
    seed: int = 0
    lora: Lora | Mapping[str, Lora] | None = None
    tie: bool = False
    untie: bool = False
    shapes: Mapping[str, Sequence[int]] | None = None
    dims: Mapping[str, int] | None = None
    device: str = "cpu"
    device_id: int | None = None
    threads: int = 0
    memory: int | str | None = None
    compiled: str | os.PathLike[str] | None = None
    hardware: Hardware | None = None
    distributed: bool | int = False
    reduce_dtype: str = "fp32"
    shard: str = ""
    pack: bool = False
    sync_batchnorm: bool = False

    def __post_init__(self) -> None:
        clips = self.clip_norm is None or self.clip_norm > 0
        if self.accumulate < 1 or min(self.seed, self.threads) < 0 or not clips:
            raise UsageError(
                "accumulate must be at least 1, seed and threads at least 0, and clip_norm above 0"
            )
        if not 0 < self.loss_scale < float("inf"):
            raise UsageError(f"the loss scale is {self.loss_scale}: it must be finite and above 0")
        if self.ema is not None and not 0 <= self.ema < 1:
            raise UsageError(f"ema is {self.ema}: it must be at least 0 and below 1")
