"""A small transformer over the rows of a picture."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsecomp._checks import check_int


def attend(queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """Scaled dot-product attention of each head, which has the next width / heads units of all three.

    torch.fx leaves the call whole, so that connectivity is followed through it: what a head's queries and keys say
    reaches all of its units, and each unit of the values stays that unit.

    (batch, tokens, width) each -> (batch, tokens, width)

    >>> x = torch.randn(2, 5, 6)
    >>> attend(x, x, x, heads=3).shape
    torch.Size([2, 5, 6])
    """
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(-3, -2) for part in (queries, keys, values))
    return F.scaled_dot_product_attention(q, k, v).transpose(-3, -2).flatten(-2)


def tokens_of(x: Tensor, tokens: int, features: int) -> Tensor:
    """(batch, [channels,] rows, features) -> (batch, tokens, features); left whole by torch.fx, as it looks at shapes."""
    if x.dim() < 3 or x.shape[-1] != features or x[0].numel() != tokens * features:
        raise ValueError(
            f"the input must be (batch, [channels,] rows, {features}) with {tokens} rows in all; got {tuple(x.shape)}."
        )
    return x.reshape(len(x), tokens, features)


torch.fx.wrap("attend")
torch.fx.wrap("tokens_of")


class _Block(nn.Module):
    """Attention and a two-layer network, each after a norm and added to what it read."""

    def __init__(self, width: int, heads: int, feedforward: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.projection = nn.Linear(width, width)
        self.feedforward_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, feedforward)
        self.down = nn.Linear(feedforward, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) -> (batch, tokens, width)."""
        normed = self.attention_norm(x)
        attended = attend(self.query(normed), self.key(normed), self.value(normed), self.heads)
        x = x + self.projection(attended)
        out: Tensor = x + self.down(F.relu(self.up(self.feedforward_norm(x))))
        return out


class RowTransformer(nn.Module):
    """A transformer encoder that takes each row of a picture for a token; all projections are Linear modules.

    Tokens are embedded, get a learned position added, pass `depth` blocks (pre-norm; ReLU in between) and a last norm,
    and are averaged before the readout. As queries, keys, values and outputs are plain Linear layers, every criterion
    can prune them, which nn.MultiheadAttention does not allow.

    Args:
        in_features: Values in a row.
        tokens: Rows in a picture, all channels together.
        out_features: Number of outputs.
        width: Units of the residual stream, a multiple of `heads`.
        heads: Heads of each attention.
        depth: Number of blocks.
        feedforward: Hidden units of each block; 4 * width if None.

    Raises:
        ValueError: If a number is not positive, `width` is no multiple of `heads`, or an input has another shape.
        TypeError: If a number is no integer.

    Reference:
        A. Vaswani et al.: Attention Is All You Need, arXiv 1706.03762. Deviation: norms come before the layers, not after
        the sums, as in arXiv 2002.04745.

    >>> RowTransformer(8, 8, 10)(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    """

    def __init__(
        self,
        in_features: int,
        tokens: int,
        out_features: int,
        width: int = 32,
        heads: int = 2,
        depth: int = 2,
        feedforward: int | None = None,
    ) -> None:
        super().__init__()
        check_int("in_features", in_features, "the number of values in a row", minimum=1)
        check_int("tokens", tokens, "the number of rows", minimum=1)
        check_int("out_features", out_features, "the number of outputs", minimum=1)
        check_int("heads", heads, "the number of heads of each attention", minimum=1)
        check_int("depth", depth, "the number of blocks", minimum=1)
        if check_int("width", width, "the units of the residual stream", minimum=1) % heads:
            raise ValueError(
                f"`width` is the units of the residual stream and must be a multiple of the {heads} heads; got {width}."
            )
        hidden = 4 * width if feedforward is None else feedforward
        check_int("feedforward", hidden, "the hidden units of each block", minimum=1)
        self.shape = tokens, in_features
        self.embedding = nn.Linear(in_features, width)
        self.position = nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(_Block(width, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.readout = nn.Linear(width, out_features)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, in_features), or with channels of rows before -> (batch, out_features)."""
        x = self.embedding(tokens_of(x, *self.shape)) + self.position
        out: Tensor = self.readout(self.norm(self.blocks(x)).mean(-2))
        return out
