"""Trains a ViT of transformers, from random weights, to tell discs, rings, squares and crosses apart.

python examples/vit/vit.py
torchrun --nproc_per_node 2 examples/vit/vit.py
torchrun --nproc_per_node 8 examples/vit/vit.py --config path/to/config.json --batch-size 512 --strategy fsdp
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForImageClassification

import meshwright as mw
from meshwright.data import GlobalOrder
from meshwright.lr_scheduler import warmup_decay

HERE = Path(__file__).parent
SHAPES = ("disc", "ring", "square", "cross")


class Shapes(Dataset):
    """Noisy images of one shape each, painted when they are asked for: ``pixel_values`` (3, S, S) and ``labels`` ().

    Place, size and both colours are drawn from the index alone, so an image is the same whenever and on whatever rank
    it is painted. A dataset of files has the same two methods.
    """

    def __init__(self, length: int, image_size: int, seed: int) -> None:
        self.length, self.image_size, self.seed = length, image_size, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * self.length + index)
        label = int(torch.randint(len(SHAPES), (), generator=generator))
        x, y, radius = torch.rand(3, generator=generator).tolist()
        radius = 0.25 + 0.1 * radius  # all of them as parts of the image
        center = [radius + (1 - 2 * radius) * place for place in (x, y)]
        bright, dark = torch.rand(2, 3, 1, 1, generator=generator) + 0.5
        shape = inside(SHAPES[label], self.image_size, center, radius)
        noise = 0.3 * torch.randn(3, self.image_size, self.image_size, generator=generator)
        return {"pixel_values": torch.where(shape, bright, -dark) + noise, "labels": torch.tensor(label)}


def inside(name: str, image_size: int, center: list[float], radius: float) -> Tensor:
    """Which pixels belong to a shape: bool of shape (image_size, image_size)."""
    places = (torch.arange(image_size) + 0.5) / image_size
    across, down = (places - center[0])[None, :].abs() / radius, (places - center[1])[:, None].abs() / radius
    far, near = torch.maximum(across, down), torch.minimum(across, down)
    distance = torch.hypot(across, down)
    return {
        "disc": distance < 1,
        "ring": (distance < 1) & (distance > 0.6),
        "square": far < 0.9,
        "cross": (far < 1) & (near < 0.3),
    }[name]


def shapes(num_images: int = 20_000, image_size: int = 32, seed: int = 0) -> Shapes:
    """The dataset of vit.toml."""
    return Shapes(num_images, image_size, seed)


def build_model(config: str | Path = HERE / "config.json") -> nn.Module:
    """An image classifier of transformers with random weights, of any kind that the config says."""
    return AutoModelForImageClassification.from_config(AutoConfig.from_pretrained(config, local_files_only=True))


def main(arguments: list[str] | None = None) -> None:
    options = parse_options(arguments)
    mw.init_distributed(seed=0)
    model = build_model(options.config)
    dataset = shapes(options.images, model.config.image_size)
    job = mw.accelerate(
        model,
        torch.optim.AdamW,
        dataset,  # no loss function: the model's output carries the loss, since its input holds labels
        strategy=options.strategy,  # None: Meshwright chooses
        model_input_format="unpack_dict",
        optim_args={"lr": options.lr, "weight_decay": 0.05},
        # An endless order, the same on any number of ranks; the batch is divided between them.
        dataloader_args={"batch_size": options.batch_size, "sampler": GlobalOrder(len(dataset), seed=0)},
        lr_scheduler_cls=warmup_decay,
        lr_scheduler_args={"num_steps": options.steps, "warmup_steps": options.steps // 10},
        max_grad_norm=1.0,
    )
    mw.print_rank(f"{job.strategy}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    for step, batch in zip(range(1, options.steps + 1), job.dataloader, strict=False):
        result = job.step(batch)
        if step % 20 == 0 or step in (1, options.steps):
            mw.print_rank(f"step {step}/{options.steps}  loss {result.loss.item():.4f} nats per image", flush=True)
    if options.save:
        mw.save(job.model, options.save)
    mw.shutdown_distributed()


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    summary, _, launching = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=launching, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", default=HERE / "config.json", help="of an image classifier (default: config.json beside this)")
    add("--steps", type=int, default=400, help="optimizer steps (default: 400)")
    add("--images", type=int, default=20_000, help="different images (default: 20000)")
    add("--batch-size", type=int, default=64, help="images per step over all ranks (default: 64)")
    add("--lr", type=float, default=2e-3, help="highest learning rate (default: 2e-3)")
    add("--strategy", help="such as \"fsdp + amp_native(dtype='bf16')\" (default: chosen)")
    add("--save", metavar="FILE", help="write the weights there in the end: an ordinary state dict")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
