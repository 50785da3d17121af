"""Operators and kernels of one's own, in any domain, that work like those of this package.

A registered operator has a body in ONNX: files that use it carry the body, so that stock
onnxruntime runs them; it is validated, fused, explained, differentiated, trained and saved. A
registered kernel is one more candidate for an operator on a GPU. `load` imports the plugins that
are installed; every command of the command line does so first.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import onnx_fuse.ir  # noqa: F401  # first: it imports onnx_ir without sympy

# isort: split
import onnx

from onnx_fuse import kernels, rewrite
from onnx_fuse.errors import UsageError, unknown
from onnx_fuse.ir.constants import BODIES, CANONICAL_OPSET, FUSE
from onnx_fuse.kernels.rule_based import HeuristicKernel
from onnx_fuse.lower.registered import registered
from onnx_fuse.lower.table import lowerings
from onnx_fuse.ops import OPS, NoGrad, OpDef, register
from onnx_fuse.ops.patterns import body_rule
from onnx_fuse.ops.rules import ADDED, Rule
from onnx_fuse.program.launch import Launch, Num, Ptr, Waits
from onnx_fuse.program.problem import Hardware, KernelConfig
from onnx_fuse.program.problems import Registered
from onnx_fuse.runtime.specialize import forget_programs

Config = KernelConfig

__all__ = [
    "Config",
    "Hardware",
    "Kernel",
    "Launch",
    "NoGrad",
    "Num",
    "OpDef",
    "Ptr",
    "Registered",
    "Rule",
    "load",
    "register_kernel",
    "register_op",
    "unregister",
]
__dir__ = __all__.copy

GROUP = "onnx_fuse.plugins"
_TAKEN = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview.training", "com.microsoft")
_loaded: set[str] = set()


class Kernel(HeuristicKernel[Any]):
    """The base of kernels: a subclass gives a name, `supports`, `configs`, `cost` and `launch`."""

    waits: Waits = ""
    """When its source waits for earlier launches, as `Launch.waits` says."""


def register_op(definition: OpDef, *, fuse: bool | Rule = False, level: int = 1) -> None:
    """Add an operator.

    Args:
        definition: Its name, domain, body (the text of one ONNX function without imports) and
            gradient rule; without a rule, the body is differentiated.
        fuse: True makes the operator of nodes that are those of its body, wherever `optimize` finds
            them; a Rule does what it says. False leaves it to files that have the operator.
        level: The lowest optimization level at which `fuse=True` works.

    Raises:
        UsageError: The domain is not free, the operator exists, or its body is none.
    """
    name, domain = definition.name, definition.domain
    if domain in _TAKEN or domain == FUSE:
        raise UsageError(f"a custom operator needs another domain than '{domain}'")
    if (domain, name) in OPS:
        raise UsageError(f"there is an operator '{domain}::{name}' already")
    if definition.saves or not definition.body:
        raise UsageError(f"'{domain}::{name}' needs a body, and no saves")
    try:
        head = f'<opset_import: ["" : {CANONICAL_OPSET}], domain: "{domain}">'
        body = onnx.parser.parse_function(f"{head}\n{definition.body}")
        onnx.checker.check_function(body)
    except (onnx.parser.ParseError, onnx.checker.ValidationError) as error:
        raise UsageError(f"the body of '{domain}::{name}': {error}") from error
    if body.name != name:
        raise UsageError(f"the body of '{domain}::{name}' is a function of another name")
    rule = fuse if isinstance(fuse, Rule) else None
    if fuse is True:
        if len(body.output) != 1:
            raise UsageError(f"'{domain}::{name}' has several outputs: give a Rule to fuse it")
        rule = body_rule(definition, level)
    if rule is not None and rule.name in rewrite.FUSIONS:
        raise UsageError(f"there is a fusion '{rule.name}' already")
    register(definition)
    if rule is not None:
        ADDED.append(rule)
        rewrite.FUSIONS[rule.name] = rule.level


def register_kernel(op: str, kernel: Any) -> None:
    """Add a candidate kernel, which is tried before the built-in ones.

    Eager operators and captured functions use it from their next run on, sessions for shapes that
    they have not run yet.
    Among kernels with a cost model the cheapest is chosen.

    Args:
        op: An operator that has kernels, such as "Softmax", or a registered one as "domain::Name".
            The problem of the latter is a `Registered`, with operands by the names in its body.
        kernel: An object with `name`, `supports`, `configs`, `fits`, `cost`, `workspace` and
            `launch`, best derived from `Kernel`. The source of a Launch is CUDA text, or a path
            under cuda_src/.

    Raises:
        UsageError: There is no such operator, or it has a kernel of this name.
    """
    domain, _, name = op.rpartition("::")
    if domain and (domain, name) not in OPS:
        raise UsageError(f"there is no operator '{op}': register it first")
    if not domain and op not in kernels.MODULES:
        raise UsageError(unknown("operator", op, kernels.MODULES))
    if any(k.name == kernel.name for k in kernels.candidates(op)):
        raise UsageError(f"{op} has a kernel '{kernel.name}' already")
    kernels.ADDED.setdefault(op, []).insert(0, kernel)
    if domain:
        lowerings()[domain, name] = registered
    forget_programs(has_only_ours=not kernels.ADDED)


def unregister(name: str) -> None:
    """Take back what was registered for an operator `name`, written "domain::Name"."""
    domain, _, op_type = name.rpartition("::")
    kernels.ADDED.pop(name, None)
    forget_programs(has_only_ours=not kernels.ADDED)
    if not domain:
        return
    OPS.pop((domain, op_type), None)
    BODIES.pop((domain, op_type), None)
    lowerings().pop((domain, op_type), None)
    ADDED[:] = [rule for rule in ADDED if rule.name != op_type]
    rewrite.FUSIONS.pop(op_type, None)


def load() -> list[str]:
    """Import the installed plugins, and return the names of those that are new.

    A plugin is an entry point of the group "onnx_fuse.plugins": a module, or a function without
    arguments, that registers operators and kernels.

    Raises:
        UsageError: A plugin cannot be loaded; the error names it.
    """
    names = []
    for entry in entry_points(group=GROUP):
        if entry.value in _loaded:
            continue
        try:
            plugin = entry.load()
            if callable(plugin):
                plugin()
        except Exception as error:
            raise UsageError(
                f"the plugin '{entry.name}' ({entry.value}) cannot be loaded: {error}"
            ) from error
        _loaded.add(entry.value)
        names.append(entry.name)
    return names
