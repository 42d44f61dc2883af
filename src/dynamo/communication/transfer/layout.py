"""`KvLayout`: how a block lies in memory, and the conversion of blocks between layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Order = Literal["HND", "NHD", "universal"]
ElementType = Literal["float32", "float16", "bfloat16"]

ELEMENT_BYTES: Final[dict[str, int]] = {"float32": 4, "float16": 2, "bfloat16": 2}
_BF16_NAN: Final = 0x7FC0
_FLOAT_INFINITY: Final = 0x7F800000


class KvLayout(msgspec.Struct, frozen=True):
    """The bytes of a KV block.

    - `model`: names the weights. Blocks of other weights mean something else.
    - `kv_heads`: heads of the model. Part `part` of `parts` devices (tensor parallelism) holds an
      equal share of them, in order.
    - `order`: HND is `[layer][key, value][head][token][dim]`, NHD has token before head, and
      universal is `[head][layer][key, value][token][dim]`, in which a part is a range of bytes.
    """

    model: str
    block_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: ElementType = "float32"
    order: Order = "HND"
    parts: int = 1
    part: int = 0

    @property
    def heads(self) -> int:
        """Heads in the block of one part."""
        return self.kv_heads // self.parts

    @property
    def block_bytes(self) -> int:
        """Bytes of the block of one part."""
        elements = self.layers * 2 * self.heads * self.block_tokens * self.head_dim
        return elements * ELEMENT_BYTES[self.dtype]

    def refusal(self, target: KvLayout) -> str:
        """Say why blocks of this layout cannot become blocks of `target`; "" if they can."""
        if reason := self.difference(target, ("model", "layers", "kv_heads", "head_dim")):
            return reason
        for layout in (self, target):
            if layout.kv_heads % layout.parts or not 0 <= layout.part < layout.parts:
                share = f"part {layout.part} of {layout.parts}"
                return f"{layout.kv_heads} heads have no equal {share}"
        return ""

    def difference(self, target: KvLayout, names: Sequence[str]) -> str:
        """Say which of the named fields differs first; "" if none does."""
        for name in names:
            theirs, ours = getattr(self, name), getattr(target, name)
            if theirs != ours:
                return f"{name} is {theirs} at the peer and {ours} here"
        return ""

    def view(self, block: Any) -> NDArray[Any]:
        """Return the memory of a block as `[layer, 2, head, token, dim]`, without a copy."""
        import numpy as np

        kind = np.uint16 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        flat = np.frombuffer(block, kind)
        layers, heads, tokens, dim = self.layers, self.heads, self.block_tokens, self.head_dim
        if self.order == "HND":
            return flat.reshape(layers, 2, heads, tokens, dim)
        if self.order == "NHD":
            return flat.reshape(layers, 2, tokens, heads, dim).transpose(0, 1, 3, 2, 4)
        return flat.reshape(heads, layers, 2, tokens, dim).transpose(1, 2, 0, 3, 4)


def convert_piece(
    source: KvLayout,
    block: Any,
    target: KvLayout,
    target_block: Any,
    source_token: int = 0,
    target_token: int = 0,
) -> None:
    """Copy the tokens of a block from `source_token` on to `target_token` of another block, as many
    as both have. The layouts must be convertible."""
    first = max(source.part * source.heads, target.part * target.heads)
    last = min((source.part + 1) * source.heads, (target.part + 1) * target.heads)
    if first >= last:
        return
    from_heads = slice(first - source.part * source.heads, last - source.part * source.heads)
    into_heads = slice(first - target.part * target.heads, last - target.part * target.heads)
    count = min(source.block_tokens - source_token, target.block_tokens - target_token)
    values = source.view(block)[:, :, from_heads, source_token : source_token + count]
    target.view(target_block)[:, :, into_heads, target_token : target_token + count] = (
        cast_elements(values, source.dtype, target.dtype)
    )


def split_block(
    number: int, block_tokens: int, target_tokens: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (number of a block of `target_tokens`, token in the source block, token in the target
    block) for each piece of block `number` of a sequence, whose blocks have `block_tokens`."""
    start = number * block_tokens
    for index in range(start // target_tokens, -(-(start + block_tokens) // target_tokens)):
        begin = max(start, index * target_tokens)
        yield index, begin - start, begin - index * target_tokens


def cast_elements(values: NDArray[Any], source: ElementType, target: ElementType) -> NDArray[Any]:
    """Convert elements. numpy knows no bfloat16: it is uint16 here, the upper half of a float32."""
    import numpy as np

    if source == target:
        return values
    if source == "bfloat16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if target == "bfloat16":
        return _to_bfloat16(np.ascontiguousarray(values, np.float32))
    with np.errstate(over="ignore"):  # beyond float16 is infinity
        return values.astype(target)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16, ties to even."""
    import numpy as np

    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    nan = (bits & 0x7FFFFFFF) > _FLOAT_INFINITY
    return np.where(nan, _BF16_NAN, rounded).astype(np.uint16)
