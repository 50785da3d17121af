"""A model on many GPUs, of one machine or of a cluster, behind one address: replicas by Ray Serve.

    pip install "ray[serve]"
    python examples/ray_replicas.py models/encoder.fused.onnx --replicas 4 --device cuda

Ray starts as many replicas as asked, each on a GPU of its own, spreads the requests over them, and
starts one anew whose process has ended or whose health check fails. A replica gathers what arrives
within a few milliseconds, and runs requests of equal shapes as one batch. The script sends some
requests of its own and ends; a service calls `deploy` and stays.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import numpy as np
from ray import serve

Arrays = dict[str, np.ndarray]
HEALTH_SECONDS = 10.0
"""Between two health checks of a replica, and the longest that one may take."""


@serve.deployment(
    health_check_period_s=HEALTH_SECONDS,
    health_check_timeout_s=HEALTH_SECONDS,
    max_ongoing_requests=64,
)
class Replica:
    """A session on one device."""

    def __init__(self, path: str, device: str, precision: str) -> None:
        import onnx_fuse as of

        self.session = of.InferenceSession(path, device=device, precision=precision)
        self.shapes = {x.name: (x.shape, x.type) for x in self.session.get_inputs()}

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0.005)
    async def __call__(self, requests: list[Arrays]) -> list[list[np.ndarray]]:
        """The outputs of each request."""
        from onnx_fuse.replicas import run_together

        return run_together(self.session, requests)

    def process(self) -> int:
        """The number of the process, for who wants to see that there are several."""
        return os.getpid()

    def check_health(self) -> None:
        """Ray replaces a replica in which this raises, or does not end."""
        from onnx_fuse.runtime import device

        if self.session.device == "cuda":
            device.wait_for_all()


def deploy(path: str, replicas: int, device: str = "cpu", precision: str = "fp32") -> Any:
    """Start the replicas, and return the handle that requests go to."""
    gpus = 1 if device == "cuda" else 0
    options = {"num_gpus": gpus, "num_cpus": 1}
    made = Replica.options(num_replicas=replicas, ray_actor_options=options)
    return serve.run(made.bind(os.path.abspath(path), device, precision), route_prefix=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", default="fp32")
    args = parser.parse_args()
    handle = deploy(args.model, args.replicas, args.device, args.precision)
    ids = np.ones((1, 8), np.int64)
    feeds = {"input_ids": ids, "attention_mask": ids, "token_type_ids": 0 * ids}
    running = [handle.remote(feeds) for _ in range(64)]
    outputs = [each.result() for each in running]
    print(f"{len(outputs)} requests, each with outputs {[y.shape for y in outputs[0]]}")
    serve.shutdown()


if __name__ == "__main__":
    main()
