"""Write scikit-learn's handwritten digits for training: `python examples/digits_data.py`.

`digits_train.npz` and `digits_test.npz` hold x [images, 64] float32 from 0 to 1, and labels
[images] int64. Every fifth image is held out. The images come with scikit-learn: `pip install
scikit-learn`.
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits


def main() -> None:
    pixels, labels = load_digits(return_X_y=True)
    x = (pixels / 16).astype(np.float32)
    held_out = np.arange(len(x)) % 5 == 0
    np.savez("digits_train.npz", x=x[~held_out], labels=labels[~held_out].astype(np.int64))
    np.savez("digits_test.npz", x=x[held_out], labels=labels[held_out].astype(np.int64))
    counts = f"{(~held_out).sum()} images, digits_test.npz: {held_out.sum()} images"
    print(f"wrote digits_train.npz: {counts}")


if __name__ == "__main__":
    main()
