"""The models of the training jobs, by name. To add one, write its module and add it to the table.

Each model belongs to a task (`hipress.train.tasks`), which defines its batches and loss. Weights
come from torch's global generator only, so a seed decides them on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from hipress.errors import UsageError, did_you_mean
from hipress.train.data import synthetic
from hipress.train.data.own import FEW, own_source
from hipress.train.models.inception import inception_v3
from hipress.train.models.lstm import Lstm
from hipress.train.models.resnet import DEPTHS, resnet
from hipress.train.models.transformers import Bert, Gpt, Transformer
from hipress.train.models.ugatit import Ugatit
from hipress.train.models.vgg import WIDTHS, cnn, small_vgg, vgg
from hipress.train.tasks import TASKS, Batch, Draw, LearningTask
from hipress.train.user_code import call, find, is_own, misfit
from hipress.version import docs_url

__all__ = ["MODELS", "Model", "check_gradients", "model", "names", "timed", "tried"]

CUSTOM_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model of the table, or one of the user's own."""

    about: str
    """One line for the manual."""
    num_parameters: int
    """Number of parameters of `build()`; 0 if only building the model tells."""
    published: str = "ours"
    """The source of `num_parameters`."""
    batch: int
    """Examples per rank and step, unless the user gives another number."""
    task: str | None
    """Key in `hipress.train.tasks.TASKS`; None if the data decides."""
    own_task: LearningTask | None = None
    """The task of the user's own data, which is drawn in place of the model's; None if the data is
    the model's."""
    build: Callable[..., nn.Module]
    """Builds the model, with weights from torch's global generator, from the sizes of its task
    (num_classes or vocabulary)."""
    draw: Draw | None
    least_side: int | None = None
    side: int | None = None
    """Image side of the synthetic data, and of folders of images."""
    length: int | None = None
    """Tokens in a sequence, unless the user gives another number."""
    is_hidden: bool = False
    """Whether the model is left out of lists: a test model or an old name."""

    @property
    def learning_task(self) -> LearningTask:
        """Batch, loss and score of the data that `data` returns."""
        return self.own_task or TASKS[self.task or ""]

    def make(self, seed: int = 0, **sizes: int) -> nn.Module:
        """Return the model with weights that depend on the seed only."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build(**sizes)

    def fitting(self, sizes: dict[str, int]) -> dict[str, int]:
        """Return the sizes of a data set that `build` takes: a language model has no classes."""
        has_classes = self.task in (None, "classify")
        return {key: size for key, size in sizes.items() if has_classes or key != "num_classes"}

    def data(self, rank: int, batch: int | None = None) -> Batch:
        """Return one batch of the data that the model is timed with, different on every rank."""
        assert self.draw is not None
        return self.draw(batch or self.batch, torch.Generator().manual_seed(rank))


def model(name: str) -> Model:
    """Return the model of the table, or a user's own by `package.module:callable`."""
    if name in MODELS:
        return MODELS[name]
    if is_own(name):
        return _custom(name)
    raise UsageError(
        f"model {name!r}{did_you_mean(name.lower(), names())} is none of {', '.join(names())}; "
        "choose one, or name your own as package.module:callable."
    )


def timed(name: str, data: str | None = None) -> Model:
    """Return a model by name with the data that it is timed with: made-up, or the user's own."""
    line = model(name)
    if data is None:
        if line.draw is None:
            raise UsageError(
                f"model {name!r} is your own, which has no made-up data to time it with; name "
                f"yours with --data package.module:callable ({docs_url('models')})."
            )
        return line
    if not is_own(data):
        raise UsageError(
            f"--data {data!r} is not of the form package.module:callable; to time a model, name a "
            "callable that returns a torch.utils.data.Dataset, or one that takes the size of a "
            f"batch and returns a batch ({docs_url('models')})."
        )
    source = own_source(data)
    sizes = line.fitting(source.sizes)
    return replace(line, own_task=source.task, draw=source.draw, build=partial(line.build, **sizes))


def tried(line: Model, name: str, device: torch.device | None = None) -> Model:
    """Return the model with its number of trained parameters, after one backward pass of it."""
    net = line.make().to(device)
    batch = tuple(part.to(device) for part in line.data(0, FEW))
    try:
        torch.autograd.backward(line.learning_task.loss(net, batch))
    except Exception as error:
        raise misfit(name, batch, error) from error
    check_gradients(net, name)
    trained = (p.numel() for p in net.parameters() if p.requires_grad)
    return replace(line, num_parameters=sum(trained))


def check_gradients(net: nn.Module, name: str) -> None:
    """Raise a UsageError if a trained parameter has no gradient after a backward pass."""
    for key, parameter in net.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise UsageError(
                f"parameter {key!r} of {name} got no gradient from a batch, on which DDP would "
                "wait for it; use it, or set its requires_grad to False."
            )


def names() -> list[str]:
    return [name for name, line in MODELS.items() if not line.is_hidden]


_TORCHVISION = "torchvision's table"
_HIPRESS = "HiPress (SOSP 2021):"
_GLUON, _MORE = "Gluon's model zoo:", "with running statistics and 6 fixed numbers"


def _classifier(
    about: str,
    num_parameters: int,
    build: Callable[..., nn.Module],
    published: str,
    *,
    least_side: int = 32,
    side: int = 224,
) -> Model:
    return Model(
        about=about,
        num_parameters=num_parameters,
        published=published,
        batch=32,
        task="classify",
        build=build,
        draw=partial(synthetic.images, (3, side, side), 1000),
        least_side=least_side,
        side=side,
    )


def _resnet(depth: int, num_parameters: int, published: str, *, is_v2: bool = False) -> Model:
    build = partial(resnet, DEPTHS[depth], is_bottleneck=depth == 50, is_v2=is_v2)
    about = f"ResNet v2 of {depth} layers: pre-activation" if is_v2 else f"ResNet of {depth} layers"
    return _classifier(about, num_parameters, build, published)


def _gpt2(num_parameters: int, *, width: int, num_layers: int, num_heads: int, batch: int) -> Model:
    return Model(
        about=f"GPT-2: {num_layers} layers, width {width}, sequences of 1,024; for a GPU",
        num_parameters=num_parameters,
        published="OpenAI's GPT-2 as released",
        batch=batch,
        task="language",
        build=partial(Gpt, width=width, num_layers=num_layers, num_heads=num_heads),
        draw=partial(synthetic.tokens, 50_257, 1024),
        length=1024,
    )


def _bert(num_parameters: int, published_mib: str, *, batch: int, **sizes: int) -> Model:
    layers, width = sizes["num_layers"], sizes["width"]
    return Model(
        about=f"BERT with both heads of its pre-training: {layers} layers, width {width}",
        num_parameters=num_parameters,
        published=f"BERT as released; {_HIPRESS} {published_mib} MiB",
        batch=batch,
        task="masked",
        build=partial(Bert, **sizes),
        draw=partial(synthetic.masked, 30_522, 128),
        length=128,
    )


def _ugatit(
    about: str, num_parameters: int, published_mib: str, *, is_light: bool, least_side: int
) -> Model:
    return Model(
        about=about,
        num_parameters=num_parameters,
        published=f"{_HIPRESS} {published_mib} MiB",
        batch=2,
        task="style",
        build=partial(Ugatit, is_light=is_light),
        draw=partial(synthetic.pairs, 256),
        least_side=least_side,
        side=256,
    )


MODELS: dict[str, Model] = {
    "vgg": Model(
        about="VGG for 32x32 images, 6 convolutions; 72 % of it is one fully connected layer",
        num_parameters=23_424_394,
        batch=8,
        task="classify",
        build=partial(small_vgg, (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 0), 4096),
        draw=partial(synthetic.images, (3, 32, 32), 10),
        least_side=32,
        side=32,
    ),
    "gpt": Model(
        about="GPT of 6 layers, width 512, 12,000 tokens, sequences of 64",
        num_parameters=25_092_096,
        batch=1,
        task="language",
        build=lambda vocabulary=12_000: Gpt(
            vocabulary=vocabulary, context=64, width=512, num_layers=6, num_heads=8
        ),
        draw=partial(synthetic.tokens, 12_000, 64),
        length=64,
    ),
    "cnn": Model(
        about="3 convolutions for images of side 8 to 64; 91 % is one fully connected layer",
        num_parameters=1_147_466,
        batch=32,
        task="classify",
        build=cnn,
        draw=partial(synthetic.images, (3, 32, 32), 10),
        least_side=8,
        side=32,
    ),
    "vgg11": _classifier("VGG of 11 layers", 132_863_336, partial(vgg, WIDTHS[11]), _TORCHVISION),
    "vgg16": _classifier("VGG of 16 layers", 138_357_544, partial(vgg, WIDTHS[16]), _TORCHVISION),
    "vgg19": _classifier(
        "VGG of 19 layers; 72 % of it is one fully connected layer",
        143_667_240,
        partial(vgg, WIDTHS[19]),
        f"{_TORCHVISION}; {_HIPRESS} 548.05 MiB",
    ),
    "resnet18": _resnet(18, 11_689_512, _TORCHVISION),
    "resnet50": _resnet(50, 25_557_032, _TORCHVISION),
    "resnet18-v2": _resnet(18, 11_687_848, f"{_GLUON} 11,695,796 {_MORE}", is_v2=True),
    "resnet50-v2": _resnet(
        50, 25_549_480, f"{_GLUON} 25,595,060 {_MORE}; {_HIPRESS} 97.46 MiB", is_v2=True
    ),
    "inception-v3": _classifier(
        "Inception v3 without its auxiliary head",
        23_834_568,
        inception_v3,
        f"{_TORCHVISION}, less the auxiliary head",
        least_side=75,
        side=299,
    ),
    "lstm": Model(
        about="2 layers of LSTM, width 1,500, embedding tied to the output, sequences of 35",
        num_parameters=85_974_278,
        published=f"{_HIPRESS} 327.97 MiB",
        batch=80,
        task="language",
        build=Lstm,
        draw=partial(synthetic.tokens, 33_278, 35),
        length=35,
    ),
    "transformer": Model(
        about="Transformer base for translation: 6 + 6 layers, width 512, one vocabulary",
        num_parameters=61_362_176,
        published=f"{_HIPRESS} 234.08 MiB; laid out as in Tensor2Tensor",
        batch=32,
        task="translate",
        build=Transformer,
        draw=partial(synthetic.translations, 33_708, 64),
        length=64,
    ),
    "bert-base": _bert(110_106_428, "420.02", width=768, num_layers=12, num_heads=12, batch=32),
    "bert-large": _bert(336_226_108, "1282.60", width=1024, num_layers=24, num_heads=16, batch=8),
    "gpt2": _gpt2(124_439_808, width=768, num_layers=12, num_heads=12, batch=4),
    "gpt2-medium": _gpt2(354_823_168, width=1024, num_layers=24, num_heads=16, batch=4),
    "gpt2-large": _gpt2(774_030_080, width=1280, num_layers=36, num_heads=20, batch=2),
    "gpt2-xl": _gpt2(1_557_611_200, width=1600, num_layers=48, num_heads=25, batch=1),
    "ugatit": _ugatit(
        "U-GAT-IT for images of side 256; 80 % of it is two fully connected layers",
        670_761_088,
        "2558.75",
        is_light=False,
        least_side=256,
    ),
    "ugatit-light": _ugatit(
        "U-GAT-IT without those two layers, for images of side 128 and more",
        134_021_248,
        "511.25",
        is_light=True,
        least_side=128,
    ),
    "mlp": Model(
        about="a perceptron that a test can afford",
        num_parameters=102_090,
        batch=8,
        task="classify",
        build=lambda num_classes=10: nn.Sequential(
            nn.Linear(64, 256),
            nn.ReLU(),
            nn.Linear(256, 320),
            nn.ReLU(),
            nn.Linear(320, num_classes),
        ),
        draw=partial(synthetic.images, (64,), 10),
        is_hidden=True,
    ),
}
"""Models by name.

The batches of vgg and gpt were chosen so that a step without any exchange takes 0.2 to 0.6 s if
four ranks, with a thread each, share two cores.
"""
MODELS["gpt-124m"] = replace(MODELS["gpt2"], is_hidden=True)  # the name of old benchmarks


# --- a user's own model ---------------------------------------------------------------------------


def _custom(name: str) -> Model:
    """Return the description of a user's own model, `package.module:callable`.

    The callable gets those sizes of the data (num_classes, vocabulary) that its signature takes,
    and returns a torch.nn.Module.
    """
    maker = find("model", name, "torch.nn.Module")
    return Model(
        about=f"the model {name!r}",
        num_parameters=0,
        published="yours",
        batch=CUSTOM_BATCH,
        task=None,
        build=lambda **sizes: _build_custom(name, maker, sizes),
        draw=None,
    )


def _build_custom(name: str, maker: Callable[..., Any], sizes: dict[str, int]) -> nn.Module:
    try:
        signature = inspect.signature(maker)
    except ValueError:  # not every builtin has one
        signature = inspect.Signature()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    given = {key: size for key, size in sizes.items() if takes_all or key in signature.parameters}
    try:
        signature.bind(**given)
    except TypeError as error:
        offered = ", ".join(sizes) or "nothing"
        raise UsageError(
            f"model {name!r} cannot be called with what this data gives ({offered}): {error}; "
            "give its other arguments defaults."
        ) from error
    built = call("model", name, maker, **given)
    if not isinstance(built, nn.Module):
        raise UsageError(
            f"model {name!r} returned {type(built).__name__} and not a torch.nn.Module; name a "
            "callable that does."
        )
    if not any(parameter.requires_grad for parameter in built.parameters()):
        raise UsageError(
            f"model {name!r} has no parameter that is trained, so it has no gradients to exchange; "
            "set requires_grad of some parameters to True."
        )
    return built
