"""A substitute for MNIST, for machines without a network: digits of matplotlib's fonts, as IDX files.

python examples/mnist_standin.py
python examples/mnist_standin.py runs/packed --gzip

It writes 60,000 and 10,000 images of 28 x 28 bytes with labels, in files with the names of MNIST's. The
files are the same each time. Every image is a printed digit, randomly rotated, scaled, sheared and
shifted.
"""

import argparse
import gzip
import struct
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

FONTS = ("DejaVuSans", "DejaVuSans-BoldOblique", "DejaVuSansMono", "DejaVuSerif", "DejaVuSerif-Italic")
MORE_FONTS = ("STIXGeneral", "STIXGeneralItalic", "STIXGeneralBol", "cmr10", "cmss10", "cmtt10")
LARGE = 56  # pixels at which glyphs are drawn, twice those of an image


def glyphs() -> Tensor:
    """Return every digit in every font, shape (fonts, 10, LARGE, LARGE), from 0 to 1."""
    folder = Path(matplotlib.get_data_path()) / "fonts/ttf"
    fonts = [ImageFont.truetype(folder / f"{name}.ttf", 44) for name in (*FONTS, *MORE_FONTS)]
    return torch.stack([torch.stack([glyph(font, str(n)) for n in range(10)]) for font in fonts])


def glyph(font: ImageFont.FreeTypeFont, digit: str) -> Tensor:
    image = Image.new("L", (LARGE, LARGE))
    left, top, right, bottom = font.getbbox(digit)
    corner = ((LARGE - left - right) / 2, (LARGE - top - bottom) / 2)
    ImageDraw.Draw(image).text(corner, digit, font=font, fill=255)
    return torch.tensor(np.asarray(image) / 255, dtype=torch.float32)


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return `count` images, shape (count, 28, 28), and their labels, as bytes."""
    random = torch.Generator().manual_seed(seed)
    drawn = glyphs()
    labels = torch.randint(10, (count,), generator=random)
    font = torch.randint(len(drawn), (count,), generator=random)
    angle, width, height, shear, right, down = torch.randn(6, count, generator=random)
    angle, width, height = 0.2 * angle, 1.15 * (0.12 * width).exp(), 1.15 * (0.12 * height).exp()
    top = torch.stack([width * angle.cos(), width * (0.2 * shear - angle.sin()), 0.12 * right], -1)
    bottom = torch.stack([height * angle.sin(), height * angle.cos(), 0.12 * down], -1)
    images = []
    for part in torch.arange(count).split(5000):
        maps = torch.stack([top[part], bottom[part]], 1)
        grid = F.affine_grid(maps, [len(part), 1, 28, 28], align_corners=False)
        # Each pixel is sampled from glyphs of twice its size, so these are halved first.
        shapes = F.avg_pool2d(drawn[font[part], labels[part]][:, None], 2)
        images.append(F.grid_sample(shapes, grid, align_corners=False)[:, 0])
    return (255 * torch.cat(images)).round().byte(), labels.byte()


def write_idx(path: Path, array: NDArray[np.uint8], *, compress: bool) -> None:
    """Write the IDX format: two zeros, 8 for bytes, number of dimensions, dimensions, data."""
    head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    data = head + array.tobytes()
    if compress:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(data, 6, mtime=0))
    else:
        path.write_bytes(data)


def main(directory: Path, training: int, test: int, *, compress: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for seed, (name, count) in enumerate((("train", training), ("t10k", test))):
        images, labels = draw(count, seed)
        write_idx(directory / f"{name}-images-idx3-ubyte", images.numpy(), compress=compress)
        write_idx(directory / f"{name}-labels-idx1-ubyte", labels.numpy(), compress=compress)
    print(f"{training:,} and {test:,} images in {directory}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, nargs="?", default="runs/mnist-data")
    parser.add_argument("--training", type=int, default=60_000)
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--gzip", action="store_true", help="compress the files, as MNIST does")
    options = parser.parse_args()
    main(options.directory, options.training, options.test, compress=options.gzip)
