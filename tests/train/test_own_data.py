"""Data of the user's own: the forms of examples, the loss of each, and what is refused."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hipress.errors import UsageError
from hipress.train.data import open_data
from hipress.train.data.own import OwnData, _forward, _take_apart, _task, own_source
from hipress.train.models import timed, tried
from hipress.train.tasks import Batch, LearningTask

OWN = """
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

number = 3

class Noisy(Dataset):
    "Adds noise to its examples, as augmentation does."
    classes = ("a", "b", "c")
    def __len__(self):
        return 10
    def __getitem__(self, index):
        return index + torch.rand(4), index % 3

def split():
    made = torch.arange(12.0).view(6, 2)
    return TensorDataset(made[:4], made[:4].sum(1)), TensorDataset(made[4:], made[4:].sum(1))

def drawn():
    return TensorDataset(torch.randn(5, 2), torch.randn(5))

def factory(batch):
    return torch.randn(batch, 4), torch.randint(3, (batch,))

def local():
    class Local(Noisy): "No pickle holds it."
    return Local()

def several():
    return TensorDataset(torch.ones(3, 2)), TensorDataset(torch.ones(3, 2)), None

class Stream(IterableDataset):
    def __iter__(self): return iter([])

def tensors():
    return torch.ones(3, 2), torch.ones(3)

def nothing():
    return []

def broken():
    raise ValueError("no such file")

class Broken(Noisy):
    def __getitem__(self, index):
        raise KeyError("labels")

def ragged():
    return [(torch.ones(k + 1), k) for k in range(4)]

def optional(batch=32):
    return factory(batch)

def empty(batch):
    return ()

def labels():
    return [(torch.ones(2), "cat")] * 4

def words():
    return [("a", 1), ("b", 2)]

def mixed():
    return [{"x": torch.ones(2)}], [{"y": torch.ones(2)}]

def same(batch):
    return torch.ones(7, 2), torch.ones(7)

class Sized(Noisy):
    def __init__(self, root):
        pass

def small():
    return nn.Linear(4, 3)

class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(2, 2)
    def forward(self, x):
        return self.used(x)
"""
NAME = "own_data_of_a_test"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{NAME}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, NAME, raising=False)


def opened(name: str) -> OwnData:
    found = open_data(f"{NAME}:{name}")
    assert isinstance(found, OwnData)
    return found


# --- examples -------------------------------------------------------------------------------------


def test_a_pair_of_data_sets_is_to_train_and_to_test() -> None:
    data = opened("split")
    assert (data.num_train, data.num_test, data.sizes) == (4, 2, {})
    inputs, targets = data.train(torch.tensor([2, 0]), seed=1)
    assert inputs.tolist() == [[4.0, 5.0], [0.0, 1.0]] and targets.tolist() == [9.0, 1.0]
    assert [part.tolist() for part in data.test(torch.tensor([1]))] == [[[10.0, 11.0]], [21.0]]


def test_classes_are_counted_and_a_class_is_a_callable_too() -> None:
    data = opened("Noisy")
    assert (data.num_train, data.num_test, data.sizes) == (10, 0, {"num_classes": 3})
    assert timed("mlp", f"{NAME}:Noisy").make().get_submodule("4").out_features == 3
    assert timed("gpt", f"{NAME}:Noisy").build.keywords == {}  # type: ignore[attr-defined]


def test_random_numbers_of_an_example_follow_from_its_index_and_the_seed() -> None:
    """Catches: augmentation that a resumed run does not repeat, or that neighbours change."""
    data = opened("local")
    before = torch.get_rng_state()
    both = data.train(torch.tensor([3, 7]), seed=5)[0]
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(9)
    assert torch.equal(data.train(torch.tensor([7]), seed=5)[0][0], both[1])
    assert not torch.equal(data.train(torch.tensor([7]), seed=6)[0][0], both[1])
    assert not torch.equal(both[0] - 3, both[1] - 7)
    copied = pickle.loads(pickle.dumps(data))  # as loader processes get it
    assert torch.equal(copied.train(torch.tensor([3, 7]), seed=5)[0], both)


def test_all_ranks_make_the_same_data_set() -> None:
    torch.manual_seed(1)
    first = opened("drawn").train(torch.arange(5), 0)
    torch.manual_seed(2)
    again = opened("drawn").train(torch.arange(5), 0)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("name", ["Noisy", "factory"])
def test_batches_to_time_with_differ_between_ranks_only(name: str) -> None:
    line = timed("mlp", f"{NAME}:{name}")
    first, again, other = (line.data(rank, 6) for rank in (0, 0, 1))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])
    assert [tuple(part.shape) for part in first] == [(6, 4), (6,)]


def test_a_model_is_tried_once_and_its_parameters_are_counted() -> None:
    line = tried(timed(f"{NAME}:small", f"{NAME}:factory"), "small")
    assert line.num_parameters == 15
    with pytest.raises(UsageError) as caught:
        tried(timed(f"{NAME}:Unused", f"{NAME}:factory"), "Unused")
    assert str(caught.value) == (
        "parameter 'unused.weight' of Unused got no gradient from a batch, on which DDP would wait "
        "for it; use it, or set its requires_grad to False."
    )


def test_data_that_does_not_fit_the_model() -> None:
    with pytest.raises(UsageError) as caught:
        tried(timed(f"{NAME}:small", f"{NAME}:split"), "small")
    assert str(caught.value) == (
        "small failed on its first batch, of shapes (2, 2), (2,): RuntimeError: mat1 and mat2 "
        "shapes cannot be multiplied (2x2 and 4x3); "
        "https://hipress.readthedocs.io/en/latest/models/ says what it is called with."
    )


# --- the loss -------------------------------------------------------------------------------------


class Gives(nn.Module):
    """Returns what it was told to, and keeps what it was given."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Tensor, **options: Tensor) -> object:
        self.given = (args, options)
        return self.output


def task_of(found: object) -> tuple[LearningTask, Batch]:
    form, batch = _take_apart("x", found)
    return _task(form), batch


X, Y = torch.ones(4, 2), torch.tensor([0, 2, 1, 1])
LOGITS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
LOSS = torch.tensor(1.5)


@pytest.mark.parametrize(
    ("found", "args", "options"),
    [
        (X, 1, ()),
        ((X, X, Y), 3, ()),
        ({"ids": X, "labels": Y}, 0, ("ids", "labels")),
        (((X, X), Y), 2, ()),
        (({"ids": X}, Y), 0, ("ids",)),
        ([X, Y], 1, ()),
    ],
    ids=["tensor", "tuple", "dict", "tuple-target", "dict-target", "pair"],
)
def test_what_the_model_is_called_with(found: object, args: int, options: tuple[str, ...]) -> None:
    model = Gives(SimpleNamespace(loss=LOSS))
    task, batch = task_of(found)
    assert float(task.loss(model, batch)) == 1.5
    assert len(model.given[0]) == args and tuple(model.given[1]) == options


@pytest.mark.parametrize(
    "output", [LOSS, {"loss": LOSS}, SimpleNamespace(loss=LOSS), (LOGITS, LOSS), [LOSS, LOGITS]]
)
def test_a_model_may_return_its_loss(output: object) -> None:
    task, batch = task_of({"x": X})
    assert float(task.loss(Gives(output), batch)) == 1.5
    score = task.evaluate(Gives(output), batch)
    assert (score.loss_sum, score.num_scored) == (6.0, 0)


def test_integer_targets_are_classes() -> None:
    """Catches: a loss or an accuracy that differs from torch's."""
    task, batch = task_of((X, Y))
    expected = functional.cross_entropy(LOGITS, Y)
    for output in (LOGITS, SimpleNamespace(loss=None, logits=LOGITS), {"logits": LOGITS}):
        assert torch.equal(task.loss(Gives(output), batch), expected)
    score = task.evaluate(Gives(LOGITS), batch)
    assert score.num_right == int((LOGITS.argmax(1) == Y).sum()) and score.num_scored == 4
    assert score.loss_sum == pytest.approx(4 * float(expected))
    assert task.num_units(batch) == 4 and task.unit == "examples"


def test_classes_may_be_the_last_dimension_or_the_second() -> None:
    pixels = torch.randint(3, (2, 5, 6), generator=torch.Generator().manual_seed(1))
    logits = torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(1))
    expected = functional.cross_entropy(logits, pixels)
    for output in (logits, logits.movedim(1, -1)):
        task, batch = task_of((torch.ones(2, 1), pixels))
        assert float(task.loss(Gives(output), batch)) == pytest.approx(float(expected))
        right = task.evaluate(Gives(output), batch).num_right
        assert right == int((logits.argmax(1) == pixels).sum())


def test_floating_point_targets_get_the_mean_squared_error() -> None:
    """Catches: (4, 1) beside (4,), which torch would broadcast to sixteen differences."""
    target = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    for output in (torch.zeros(4), torch.zeros(4, 1)):
        task, batch = task_of((X, target))
        found = task.loss(Gives(output), batch)
        assert float(found) == 7.5 and found.dtype == torch.float32
        assert task.evaluate(Gives(output), batch).num_scored == 0


@pytest.mark.parametrize(
    ("found", "output", "message"),
    [
        (
            {"x": X}, LOGITS,
            "the model returned a tensor of shape (4, 3), in which there is no loss, and the data "
            "has no target; return a scalar or an object with .loss, or give pairs (inputs, "
            "target).",
        ),
        (
            (X, Y), (LOGITS, LOGITS),
            "the model returned a tuple, which cannot be compared with a target; return a tensor, "
            "or an object with .loss or .logits.",
        ),
        (
            (X, Y), torch.ones(4, 1),
            "the model returned a tensor of shape (4, 1) for integer targets of shape (4,); "
            "integer targets get the cross entropy, which needs one more dimension, the classes, "
            "last or second.",
        ),
        (
            (X, X), LOGITS,
            "the model returned a tensor of shape (4, 3) for targets of shape (4, 2); "
            "floating-point targets get the mean squared error, for which both must have one "
            "shape.",
        ),
    ],
    ids=["no-loss", "tuple", "one-class", "shape"],
)  # fmt: skip
def test_outputs_that_do_not_fit(found: object, output: object, message: str) -> None:
    form, batch = _take_apart("x", found)
    with pytest.raises(UsageError) as caught:
        _forward(form, Gives(output), batch)
    assert str(caught.value) == message


# --- refused --------------------------------------------------------------------------------------

NOT_ONE = "return a torch.utils.data.Dataset with a length and examples by index, or take the size"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("several", "returned 3 values; return a torch.utils.data.Dataset, or a pair of them"),
        ("Stream", f"returned Stream, which is no map-style data set; {NOT_ONE}"),
        ("tensors", f"returned Tensor, which is no map-style data set; {NOT_ONE}"),
        ("nothing", "has no examples; return a data set that has some."),
        ("broken", f"failed: ValueError: no such file ({NAME}.py, line 43); correct it."),
        ("Broken", f"failed on example 0: KeyError: 'labels' ({NAME}.py, line 47); correct it."),
        ("words", "holds a str; it must hold tensors (or numbers), in a pair (inputs, target)"),
        ("labels", "holds a tuple of str; it must hold tensors (or numbers), in a pair (inputs, "),
        ("factory", "takes an argument, so it makes batches to time a model with; training needs"),
        ("number", "is of type int and cannot be called; name a function or class that returns a"),
        ("gone", f": module '{NAME}' has no 'gone'; name a callable that it has."),
    ],
)
def test_data_that_cannot_be_trained_with(name: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        opened(name)
    assert message in str(caught.value) and f"data '{NAME}:{name}'" in str(caught.value)


def test_examples_of_several_shapes_or_forms() -> None:
    with pytest.raises(UsageError, match="make no batch: RuntimeError: .* of the same shapes in"):
        opened("ragged").train(torch.tensor([0, 1]), 0)
    with pytest.raises(UsageError, match="different forms: y without a target and x without a"):
        opened("mixed").test(torch.tensor([0]))


def test_a_path_beside_own_data() -> None:
    with pytest.raises(UsageError) as caught:
        open_data(f"{NAME}:split", [Path("folder")])
    assert str(caught.value) == (
        f"data '{NAME}:split' is your own and takes no path, not 'folder'; leave it out."
    )


def test_batches_that_do_not_have_the_size() -> None:
    with pytest.raises(UsageError) as caught:
        own_source(f"{NAME}:same").draw(3, torch.Generator())
    assert str(caught.value) == (
        f"data '{NAME}:same' was asked for 3 examples and returned tensors of shapes (7, 2), (7,); "
        "the first dimension of each must count the examples."
    )
    with pytest.raises(UsageError, match="holds a Sized; it must hold tensors"):
        own_source(f"{NAME}:Sized")


def test_a_size_with_a_default_is_given() -> None:
    """Catches: `def data(batch=32)` taken for a data set, or asked for 32 examples only."""
    inputs, targets = own_source(f"{NAME}:optional").draw(5, torch.Generator())
    assert (len(inputs), len(targets)) == (5, 5)


def test_an_empty_batch() -> None:
    with pytest.raises(UsageError, match=f"^a batch of data '{NAME}:empty' is empty; it must hold"):
        own_source(f"{NAME}:empty")


def test_named_data_does_not_time_a_model() -> None:
    with pytest.raises(UsageError) as caught:
        timed("cnn", "digits")
    assert str(caught.value) == (
        "--data 'digits' is not of the form package.module:callable; to time a model, name a "
        "callable that returns a torch.utils.data.Dataset, or one that takes the size of a batch "
        "and returns a batch (https://hipress.readthedocs.io/en/latest/models/)."
    )
