"""A Python loop that depends on the data, with gradients through all of its steps.

    python examples/nn_newton.py

Newton's method finds x with x³ = a in as many steps as it takes, and halves a step that overshoots.
The gradient of the result by a is known: 1 / (3 x²).
"""

from __future__ import annotations

from onnx_fuse import nn


def cube_root(a: nn.Tensor, start: float = 1.0) -> tuple[nn.Tensor, int]:
    """The root, and the number of steps that it took."""
    x, steps = a * 0 + start, 0
    while abs((x**3 - a).item()) > 1e-5 * a.item() and steps < 50:
        step = (x**3 - a) / (3 * x * x)
        if abs(step.item()) > 0.5 * x.item():
            step = step * 0.5
        x, steps = x - step, steps + 1
    return x, steps


if __name__ == "__main__":
    for number in (2.0, 1000.0):
        a = nn.tensor(number, requires_grad=True)
        root, steps = cube_root(a)
        root.backward()
        print(
            f"{root.item():.5f}³ = {number} after {steps} steps, d root / d a = {a.grad.item():.6f}"
        )
