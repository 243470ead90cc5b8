"""A picture as a function of the coordinates of its pixels."""

import struct
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sparsecomp._checks import check_choice, check_int, check_number
from sparsecomp.data.in_memory import InMemoryDataModule, Part
from sparsecomp.functions.coordinates import pixel_grid

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_HEADER = struct.Struct(">8s4x4sII")  # signature, length of the first chunk, its name, width, height
_LUMA = (0.299, 0.587, 0.114)
_CHANNELS = {"grey": 1, "rgb": 3}


class PictureDataModule(InMemoryDataModule):
    """The pixels of a PNG file: coordinates to grey or colour.

    x: (batch, 4) float32, the columns x (-1 left, 1 right), y (-1 top, 1 bottom), d = 1.4 sqrt(x^2 + y^2) and bias = 1,
    or 3 without bias; y: (batch, 1) or (batch, 3) float32 in [0, 1]. Pixels held out for validation and testing are
    drawn at random from `split_seed`, and are the same for every `seed`. A transparent pixel lies on white. Grey is
    .299 R + .587 G + .114 B. Of an animated file the first picture counts.

    Args:
        path: The PNG file.
        channels: "grey" for one output, "rgb" for three.
        bias: Whether x has a column of ones.
        validation: Share of pixels held out for validation, in [0, 1); with 0 there is no validation.
        test: Share of pixels held out for testing, in (0, 1); of both shares, the number of pixels is rounded.
        batch_size: Pixels in a training batch, >= 1.
        max_pixels: The largest width times height that is read, >= 1.
        split_seed: Chooses the pixels held out.
        seed: Start of the training order, a new one in each epoch; the run's seed if None.

    Attributes:
        inputs: x of all pixels, row by row from the top, and
        targets: y of all pixels, both after `setup`.
        size: Height and width, after `setup`.

    Raises:
        ValueError: If a number is out of its range; in `setup`, if the file is no PNG, is broken or too large, or no
            pixel is left for training or testing.
        TypeError: If an argument has the wrong type.
        FileNotFoundError: In `setup`, if there is no such file.

    Reference:
        ITU-R BT.601 for grey; the inputs are those of `coordinate_inputs`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (20, 10), "red").save(f"{folder}/red.png")
    ...     data = PictureDataModule(f"{folder}/red.png")
    ...     data.setup("fit")
    >>> x, y = next(iter(data.train_dataloader()))
    >>> x.shape, y[0].tolist(), len(data.test_dataloader().tensors[0])
    (torch.Size([128, 4]), [1.0, 0.0, 0.0], 20)
    """

    def __init__(
        self,
        path: str | Path,
        channels: str = "rgb",
        bias: bool = True,
        validation: float = 0.1,
        test: float = 0.1,
        batch_size: int = 128,
        max_pixels: int = 1024 * 1024,
        split_seed: int = 0,
        seed: int | None = None,
    ) -> None:
        super().__init__(batch_size, seed)
        if not isinstance(path, str | Path):
            raise TypeError(f"`path` is the PNG file and must be a string or a Path; got {path!r}.")
        self.path = path
        self.channels = check_choice("channels", channels, "what the outputs are", tuple(_CHANNELS))
        if not isinstance(bias, bool):
            raise TypeError(f"`bias` is whether there is an input of ones and must be True or False; got {bias!r}.")
        self.bias = bias
        self.validation = check_number("validation", validation, "the share of pixels for validation", "in [0, 1)")
        self.test = check_number("test", test, "the share of pixels for testing", "in (0, 1)")
        if not (0.0 <= validation < 1.0 and 0.0 < test < 1.0 and validation + test < 1.0):
            raise ValueError(
                "`validation` and `test` are shares of the pixels and must be in [0, 1) and (0, 1), with a sum below 1; got "
                f"{validation!r} and {test!r}."
            )
        self.max_pixels = check_int("max_pixels", max_pixels, "the largest number of pixels", minimum=1)
        self.split_seed = check_int("split_seed", split_seed, "what chooses the pixels held out")

    @property
    def in_features(self) -> int:
        """Number of inputs."""
        return 3 + self.bias

    @property
    def out_features(self) -> int:
        """Number of outputs."""
        return _CHANNELS[self.channels]

    def _parts(self) -> dict[Part, tuple[Tensor, Tensor]]:
        rgb = read_png(self.path, self.max_pixels)
        height, width, _ = rgb.shape
        count = height * width
        validation, test = round(self.validation * count), round(self.test * count)
        first = count - validation - test
        if first < 1 or test < 1:
            raise ValueError(
                f"`path` is the PNG file and must have pixels for training and testing; {self.path} has {width} x {height}, "
                f"of which {first} are for training and {test} for testing. Change `validation` and `test`."
            )
        self.size = (height, width)
        self.inputs = pixel_grid(height, width, self.bias)
        self.targets = (rgb if self.channels == "rgb" else _grey(rgb)).view(count, self.out_features)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.split_seed % 2**63))
        names: tuple[Part, ...] = ("train", "val", "test")
        parts = zip(names, order.split([first, validation, test]), strict=True)
        return {name: (self.inputs[part], self.targets[part]) for name, part in parts}


def read_png(path: str | Path, max_pixels: int) -> Tensor:
    """The picture in a PNG file: (height, width, 3) float32 in [0, 1], transparent pixels on white.

    The size is read from the file's header and checked before anything is decoded.

    Args:
        path: The file.
        max_pixels: The largest width times height.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is no PNG, is broken, or has more pixels.
    """
    meaning = "`path` is the PNG file"
    if not Path(path).is_file():
        raise FileNotFoundError(f"{meaning} and must exist; got {str(path)!r}, where there is no file.")
    with Path(path).open("rb") as file:
        header = file.read(_HEADER.size)
    if not header.startswith(_SIGNATURE):
        raise ValueError(f"{meaning}, and {path} is none: its first bytes are {header[:8]!r}. Convert it to PNG.")
    broken = f"{meaning}, and {path} is broken"
    if len(header) < _HEADER.size:
        raise ValueError(f"{broken}: it ends within its header.")
    _, _, width, height = _HEADER.unpack(header)
    if width * height > max_pixels:
        raise ValueError(
            f"{meaning} and must have at most `max_pixels`={max_pixels} pixels; {path} has {width} x {height}. Scale it "
            "down or raise `max_pixels`."
        )
    try:
        with Image.open(path, formats=["PNG"]) as image:
            return _decode(image)
    except (OSError, SyntaxError, ValueError) as error:  # all of them are raised by PIL for broken files
        raise ValueError(f"{broken}: {error}.") from error


def _decode(image: Image.Image) -> Tensor:
    if image.mode.startswith("I"):  # grey of 16 bits, which PIL's own conversion would clip
        grey = torch.from_numpy(np.asarray(image).astype(np.float32)) / 65535
        return grey.unsqueeze(-1).expand(-1, -1, 3).contiguous()
    rgba = torch.from_numpy(np.asarray(image.convert("RGBA")).astype(np.float32)) / 255
    colour, alpha = rgba[..., :3], rgba[..., 3:]
    return colour * alpha + (1 - alpha)


def _grey(rgb: Tensor) -> Tensor:
    return (rgb @ rgb.new_tensor(_LUMA)).clamp(0, 1)
