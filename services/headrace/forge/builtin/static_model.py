"""A static embedding model: a vector for each token of a vocabulary, and a text's vector is the mean of them.

It is read without any library of its own: `*.safetensors` with the vectors and `tokenizer.json` (or the tokenizer's
file of the package) in one folder, as model2vec writes it, or the files that the package `wordllama` carries. A CPU
embeds thousands of texts a second with it.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from headrace.contracts.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Sequence

PACKAGE: Final = "wordllama"
_WEIGHTS: Final = "weights/l2_supercat_256.safetensors"
_TOKENIZER: Final = "tokenizers/l2_supercat_tokenizer_config.json"
_DTYPES: Final = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
_NEEDED: Final = "pip install 'headrace[embed]'"
MAX_HEADER: Final = 100 << 20
_AXES: Final = 2


class StaticModel:
    """Vectors and tokenizer; `embed` gives unit vectors of `dimensions` numbers."""

    def __init__(self, weights: Path, tokenizer: Path) -> None:
        try:
            import numpy as np
            from tokenizers import Tokenizer
        except ImportError:
            raise InvalidInput(f"embed needs numpy and tokenizers: {_NEEDED}", code="missing_extra") from None
        self._numpy: Any = np
        self._vectors: Any = read_vectors(weights)
        self.dimensions = int(self._vectors.shape[1])
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(tokenizer))
        except Exception as e:  # noqa: BLE001  (tokenizers raises bare Exceptions)
            msg = f"the tokenizer {tokenizer} cannot be read: {str(e)[:200]}"
            raise InvalidInput(msg, code="bad_model") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """One vector for each text, of length 1 (or 0, for a text without a token)."""
        np = self._numpy
        made: list[list[float]] = []
        for found in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False):
            ids = np.asarray([i for i in found.ids if i < len(self._vectors)], dtype=np.int64)
            if not len(ids):
                made.append([0.0] * self.dimensions)
                continue
            mean = self._vectors[ids].astype(np.float64).mean(axis=0)
            length = float(np.sqrt((mean * mean).sum()))
            # Six digits are what 16 bits of weights carry; more would be noise on the wire and on disk.
            made.append((mean / (length or 1.0)).round(6).tolist())
        return made


def load_static_model(folder: str = "") -> StaticModel:
    """The model in `folder`, or the one of the package; raise `InvalidInput` saying what is missing."""
    if folder:
        path = Path(folder).expanduser()
        weights = sorted(path.glob("*.safetensors"))
        tokenizer = path / "tokenizer.json"
        if len(weights) != 1 or not tokenizer.is_file():
            msg = f"{path} is no static embedding model: it needs one *.safetensors and tokenizer.json"
            raise InvalidInput(msg, field="model", code="bad_model")
        return StaticModel(weights[0], tokenizer)
    found = find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        msg = (
            f"embed needs a model: {_NEEDED} (its package {PACKAGE} carries one), or name a folder by "
            '[functions.embed] options = { model = "PATH" }'
        )
        raise InvalidInput(msg, code="missing_extra")
    # The package itself is not imported: its files are all that is needed, and its imports are many.
    root = Path(found.submodule_search_locations[0])
    return StaticModel(root / _WEIGHTS, root / _TOKENIZER)


def read_vectors(path: Path) -> Any:
    """The one matrix of a safetensors file, mapped into memory: processes share its pages.

    The format: https://huggingface.co/docs/safetensors (8 bytes of length, a JSON header, the data).
    """
    import numpy as np

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(MAX_HEADER, size - 8):
                raise ValueError("its header is longer than the file")
            header: dict[str, Any] = json.loads(file.read(length))
        matrices = [v for k, v in header.items() if k != "__metadata__" and len(v["shape"]) == _AXES]
        if len(matrices) != 1:
            raise ValueError(f"it has {len(matrices)} matrices, and not one")
        (found,) = matrices
        first, end = found["data_offsets"]
        rows, columns = found["shape"]
        dtype = np.dtype(_DTYPES[found["dtype"]])
        if end - first != rows * columns * dtype.itemsize or 8 + length + end > size:
            raise ValueError("its data is not as long as its header says")
        return np.memmap(path, dtype=dtype, mode="r", offset=8 + length + first, shape=(rows, columns))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InvalidInput(f"{path} is no model that embed can read: {e}", code="bad_model") from None
