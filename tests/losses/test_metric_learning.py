"""Losses of pytorch-metric-learning: the same numbers as the library's, and everything a Kedge loss promises."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_metric_learning import distances, losses, miners, reducers, regularizers

from kedge import Model, train
from kedge.config.compose import build_loss, compose, loss_heads
from kedge.errors import ConfigError
from kedge.losses import MetricLearningLoss
from kedge.training import resume_run

CLASSES, DIM = 5, 6
SIZED = {"num_classes": CLASSES, "embedding_size": DIM}
NOT_FOR_LABELS = {"ManifoldLoss", "VICRegLoss"}
NEEDED: dict[str, dict[str, Any]] = {"RankedListLoss": {"margin": 0.4, "Tn": 1}}
ALL = sorted(
    name
    for name, kind in vars(losses).items()
    if inspect.isclass(kind)
    and issubclass(kind, losses.BaseMetricLossFunction)
    and name not in {"BaseMetricLossFunction", "GenericPairLoss", *NOT_FOR_LABELS}
)
CLASSIFYING = ["ArcFaceLoss", "CosFaceLoss", "NormalizedSoftmaxLoss", "ProxyNCALoss", "SoftTripleLoss"]


def batch(count: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    embeddings = torch.randn(count, DIM, generator=chance, requires_grad=True)
    return embeddings, torch.randint(CLASSES, (count,), generator=chance)


def ours(loss: str, **settings: Any) -> MetricLearningLoss:
    torch.manual_seed(0)
    return MetricLearningLoss(CLASSES, DIM, loss, **settings)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("TripletMarginLoss", {"margin": 0.3, "swap": True}),
        ("ContrastiveLoss", {"neg_margin": 0.7}),
        ("MultiSimilarityLoss", {"alpha": 3}),
        ("SupConLoss", {}),
        ("ArcFaceLoss", {"margin": 20, **SIZED}),
        ("CosFaceLoss", {"scale": 10, **SIZED}),
        ("SubCenterArcFaceLoss", {"sub_centers": 2, **SIZED}),
        ("ProxyAnchorLoss", {"alpha": 10, **SIZED}),
        ("P2SGradLoss", {"num_classes": CLASSES, "descriptors_dim": DIM}),
        ("MarginLoss", {"learn_beta": True}),
    ],
)
@pytest.mark.parametrize("miner", [None, "MultiSimilarityMiner"])
def test_the_library_says_the_same(name: str, arguments: dict[str, Any], miner: str | None) -> None:
    if miner and name == "P2SGradLoss":
        pytest.skip("takes no mined pairs")
    theirs = getattr(losses, name)(**arguments)
    free = {key: value for key, value in arguments.items() if key not in {*SIZED, "descriptors_dim"}}
    loss = ours(name, arguments=free, miner=miner, miner_arguments={"epsilon": 0.2} if miner else None)
    theirs.load_state_dict(loss.loss.state_dict())
    embeddings, labels = batch()
    mined = miners.MultiSimilarityMiner(epsilon=0.2)(embeddings, labels) if miner else None
    expected = theirs(embeddings, labels, mined)
    assert expected > 0
    wanted = torch.autograd.grad(expected, [embeddings, *theirs.parameters()])
    parts = loss.components(embeddings, labels)
    assert list(parts) == ["loss"]
    assert parts["loss"].shape == ()
    torch.testing.assert_close(parts["loss"], expected.reshape(()))
    found = torch.autograd.grad(loss(embeddings, labels), [embeddings, *loss.parameters()])
    torch.testing.assert_close(found, wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(loss(embeddings, labels), expected.reshape(()))
        assert loss(embeddings.bfloat16(), labels).dtype == torch.float32


def test_what_the_library_may_have_is_built_by_hydra() -> None:
    overrides = [
        "loss=metric_learning",
        "loss.loss=TripletMarginLoss",
        "+loss.arguments.distance._target_=pytorch_metric_learning.distances.LpDistance",
        "+loss.arguments.distance.normalize_embeddings=false",
    ]
    node = compose(overrides).loss
    loss = build_loss(node, num_classes=CLASSES, dim=DIM)
    embeddings, labels = batch()
    theirs = losses.TripletMarginLoss(distance=distances.LpDistance(normalize_embeddings=False))
    torch.testing.assert_close(loss(embeddings, labels), theirs(embeddings, labels))
    assert loss_heads(node) == ("linear", "none", "unit")
    overrides += ["loss.miner=TripletMarginMiner", "+loss.miner_arguments.type_of_triplets=semihard"]
    assert loss_heads(compose(overrides).loss) == ("linear", "none", "unit")


@pytest.mark.parametrize("name", ALL)
def test_every_loss_takes_any_batch(name: str) -> None:
    loss = ours(name, arguments=NEEDED.get(name))
    for labels in ([0], [0, 0], [0, 0, 0], [0, 1, 2], [0, 0, 1, 1, 2, 2]):
        embeddings = torch.randn(len(labels), DIM, requires_grad=True)
        value = loss(embeddings, torch.tensor(labels))
        value.backward()
        assert value.isfinite()
        assert embeddings.grad is not None
        assert embeddings.grad.isfinite().all()
        if len(set(labels)) == len(labels) and name in {"TripletMarginLoss", "NCALoss", "SupConLoss", "NPairsLoss"}:
            assert value == 0
            assert not embeddings.grad.any()


@pytest.mark.parametrize("miner", ["TripletMarginMiner", "BatchHardMiner", "MultiSimilarityMiner"])
def test_nothing_mined_is_nothing_lost(miner: str) -> None:
    loss = ours("TripletMarginLoss", miner=miner)
    embeddings = torch.randn(3, DIM, requires_grad=True)
    value = loss(embeddings, torch.tensor([0, 1, 2]))
    value.backward()
    assert value == 0
    assert embeddings.grad is not None
    assert not embeddings.grad.any()


# ---------------------------------------------------------------------- mixed images


@pytest.mark.parametrize("name", [*CLASSIFYING, "SubCenterArcFaceLoss", "SphereFaceLoss"])
def test_mixed_images_have_the_loss_of_both_classes_by_their_shares(name: str) -> None:
    loss = ours(name).double()
    theirs = getattr(losses, name)(**SIZED, reducer=reducers.DoNothingReducer()).double()
    theirs.load_state_dict(loss.loss.state_dict())
    embeddings, labels = (part.detach() for part in batch())
    embeddings = embeddings.double().requires_grad_()
    others, weights = labels.roll(1), torch.linspace(0, 1, 20, dtype=torch.float64)
    own, other = (theirs(embeddings, one)["loss"]["losses"] for one in (labels, others))
    expected = (weights * own + (1 - weights) * other).mean()
    found = loss.mixed_components(embeddings, labels, others, weights)
    assert list(found) == ["loss"]
    torch.testing.assert_close(found["loss"], expected, rtol=1e-12, atol=0)
    pairs = [torch.autograd.grad(value, embeddings)[0] for value in (found["loss"], expected)]
    torch.testing.assert_close(*pairs, rtol=1e-9, atol=1e-12)
    unmixed = loss.mixed_components(embeddings, labels, others, torch.ones_like(weights))
    torch.testing.assert_close(unmixed["loss"], loss(embeddings, labels), rtol=1e-12, atol=0)
    # Image by image, each alone with the library: nobody's loss comes from a neighbour's label.
    single = [theirs(embeddings[[row]], labels[[row]])["loss"]["losses"][0] for row in range(20)]
    torch.testing.assert_close(torch.stack(single), own, rtol=1e-9, atol=1e-12)


def test_regularisation_counts_once() -> None:
    regularised = {"weight_regularizer": regularizers.LpRegularizer()}
    plain, loss = ours("CosFaceLoss"), ours("CosFaceLoss", arguments=regularised)
    embeddings, labels = batch()
    weights = torch.full((20,), 0.25)
    difference = loss.mixed_components(embeddings, labels, labels.roll(1), weights)["loss"]
    difference = difference - plain.mixed_components(embeddings, labels, labels.roll(1), weights)["loss"]
    torch.testing.assert_close(difference, loss.loss.W.norm(dim=0).mean())


@pytest.mark.parametrize(
    ("name", "miner"),
    [
        ("TripletMarginLoss", None),
        ("ProxyAnchorLoss", None),
        ("SupConLoss", None),
        ("MultiSimilarityLoss", None),
        ("InstanceLoss", None),
        ("ArcFaceLoss", "MultiSimilarityMiner"),
    ],
)
def test_what_looks_at_others_takes_no_mixed_images(name: str, miner: str | None) -> None:
    embeddings, labels = batch()
    with pytest.raises(ConfigError, match=rf"The loss {name} takes no mixed images: set recipe\.mixing\.cutmix"):
        ours(name, miner=miner).mixed_components(embeddings, labels, labels.roll(1), torch.rand(20))


# ---------------------------------------------------------------------- heads and names


@pytest.mark.parametrize("name", ALL)
def test_the_head_follows_from_what_the_loss_looks_at(name: str) -> None:
    def make(**sizes: int) -> MetricLearningLoss:
        return MetricLearningLoss(**sizes, loss=name, arguments=NEEDED.get(name, {}))

    rng, labels = torch.Generator().manual_seed(0), torch.arange(24) % 3
    clusters = torch.randn(3, 4, generator=rng, dtype=torch.float64)[labels]
    embeddings = clusters + torch.randn(24, 4, generator=rng, dtype=torch.float64) / 2
    values = []
    for length in (1, 4):
        torch.manual_seed(0)
        values.append(make(num_classes=3, dim=4)(length * embeddings, labels))
    scale_invariant = torch.isclose(*values, rtol=1e-4)
    assert make(num_classes=3, dim=4).heads == (
        ("unit", "linear", "none") if scale_invariant else ("linear", "none", "unit")
    )


def test_existing_losses_keep_their_heads() -> None:
    assert loss_heads(compose(["loss=cam", "recipe=paper"]).loss) == ("bounded", "linear", "none")
    assert loss_heads(compose(["loss=cam"]).loss) == ("none", "batchnorm", "linear")
    assert loss_heads(compose(["loss=center"]).loss) == ("none", "batchnorm", "linear", "bounded")
    assert loss_heads(compose(["loss=arcface"]).loss)[0] == "unit"


def test_names() -> None:
    first, second = ours("ContrastiveLoss"), ours("ContrastiveLoss", name="pairs")
    assert (first.name, second.name) == ("ContrastiveLoss", "pairs")


# ---------------------------------------------------------------------- runs


def test_three_lines_of_yaml_make_a_loss(tiny: list[str], tmp_path: Path) -> None:
    lines = "_target_: kedge.losses.MetricLearningLoss\nloss: NPairsLoss\nname: n_pairs\n"
    (tmp_path / "mine/loss").mkdir(parents=True)
    (tmp_path / "mine/loss/n_pairs.yaml").write_text(lines)
    overrides = [f"hydra.searchpath=[file://{tmp_path}/mine]", "loss=n_pairs", "recipe.epochs=1"]
    model = train(overrides=[*tiny, *overrides, "recipe.optimizer.lr=0.01"], folder=tmp_path / "run")
    assert model.loss == "n_pairs"
    named = ["loss=metric_learning", "loss.loss=NPairsLoss", "loss.miner=BatchHardMiner"]
    loss = build_loss(compose([*tiny, *named]).loss, num_classes=CLASSES, dim=DIM)
    assert loss.name == "NPairsLoss"
    assert isinstance(loss.miner, miners.BatchHardMiner)


def test_proxies_are_trained_saved_and_resumed(tiny: list[str], tmp_path: Path) -> None:
    overrides = [*tiny, "loss=proxy_anchor", "recipe.optimizer.lr=0.001", "recipe.schedule.name=constant"]
    model = train(overrides=[*overrides, "recipe.epochs=2"], folder=tmp_path / "whole")
    train(overrides=[*overrides, "recipe.epochs=1"], folder=tmp_path / "halves")
    config = tmp_path / "halves/config.yaml"
    config.write_text(config.read_text().replace("epochs: 1\n", "epochs: 2\n"))
    first = torch.load(tmp_path / "halves/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    resume_run(tmp_path / "halves")
    whole, halves = (
        torch.load(tmp_path / name / "checkpoints/last.ckpt", weights_only=True) for name in ("whole", "halves")
    )
    assert whole["state_dict"].keys() == halves["state_dict"].keys()
    assert all(torch.equal(value, halves["state_dict"][name]) for name, value in whole["state_dict"].items())
    assert not torch.equal(first["loss.loss.proxies"], whole["state_dict"]["loss.loss.proxies"])
    groups = {group["name"]: group for group in whole["optimizer_states"][0]["param_groups"]}
    assert groups["loss"]["weight_decay"] == 0
    assert groups["loss"]["lr"] == pytest.approx(10 * groups["backbone"]["lr"])
    loaded = Model.load(tmp_path / "halves", device="cpu")
    assert (loaded.loss, loaded.encoder.head_kind) == ("proxy_anchor", "unit")
    pixels = torch.randint(256, (3, 3, 12, 12), dtype=torch.uint8)
    assert torch.equal(loaded.embed_pixels(pixels), model.embed_pixels(pixels))
    torch.testing.assert_close(loaded.embed_pixels(pixels).norm(dim=1), torch.ones(3))


def test_a_run_with_mixed_images(tiny: list[str], tmp_path: Path) -> None:
    overrides = [*tiny, "recipe.optimizer.lr=0.001", "recipe.epochs=1", "recipe.mixing.cutmix=0.5"]
    train(overrides=[*overrides, "loss=arcface"], folder=tmp_path / "arcface")
    with pytest.raises(ConfigError, match="The loss triplet takes no mixed images"):
        train(overrides=[*overrides, "loss=triplet"], folder=tmp_path / "triplet")
    with pytest.raises(ConfigError, match=r"head=bounded does not suit the loss triplet; use unit or linear or none"):
        train(overrides=[*overrides, "loss=triplet", "encoder.head=bounded"], folder=tmp_path / "head")


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"loss": "Triplet"}, ["loss must be", "'Triplet'", "Did you mean TripletMarginLoss?"]),
        ({"loss": "ArcfaceLos"}, ["Did you mean ArcFaceLoss"]),
        ({"loss": "BaseMetricLossFunction"}, ["loss must be the name of a class"]),
        ({"loss": "CrossBatchMemory"}, ["loss must be the name of a class"]),
        ({"loss": None}, ["found None"]),
        ({"loss": "SupConLoss", "miner": "BatchHrdMiner"}, ["miner must be", "BatchHardMiner"]),
        ({"loss": "SupConLoss", "arguments": {"temperatur": 1}}, ["SupConLoss cannot be built", "'temperatur'"]),
        (
            {"loss": "SupConLoss", "arguments": {"mat_based_loss": True}},
            ["SupConLoss cannot be built", "'mat_based_loss'"],
        ),
        ({"loss": "ArcFaceLoss", "arguments": {"num_classes": 3}}, ["ArcFaceLoss cannot be built", "'num_classes'"]),
        ({"loss": "ArcFaceLoss", "arguments": {"margin": "wide"}}, ["ArcFaceLoss cannot be built", "wide"]),
        ({"loss": "ArcFaceLoss", "arguments": [1]}, ["ArcFaceLoss cannot be built", "[1]"]),
        ({"loss": "RankedListLoss"}, ["RankedListLoss", "'margin' and 'Tn'"]),
        ({"loss": "SupConLoss", "miner_arguments": {"margin": 1}}, ["miner_arguments", "without a miner"]),
        ({"loss": "SupConLoss", "miner": "PairMarginMiner", "miner_arguments": {"margin": 1}}, ["'margin'"]),
    ],
)
def test_what_cannot_be_built(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        MetricLearningLoss(CLASSES, DIM, **settings)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_what_cannot_be_computed_is_one_sentence(tiny: list[str], tmp_path: Path) -> None:
    for number, (overrides, words) in enumerate(
        (
            (["loss=triplet", "loss.arguments.margin=wide"], "The loss triplet cannot be computed: "),
            (["loss=metric_learning", "loss.loss=VICRegLoss"], "The loss VICRegLoss cannot be computed: labels "),
            (["loss=metric_learning"], "Missing mandatory value: loss.loss"),
        )
    ):
        with pytest.raises(ConfigError, match=words):
            train(overrides=[*tiny, *overrides], folder=tmp_path / str(number))


def test_a_batch_that_the_library_refuses() -> None:
    loss = ours("SmoothAPLoss")
    with pytest.raises(ConfigError, match="SmoothAPLoss cannot be computed: All classes must have the same number"):
        loss(torch.randn(3, DIM), torch.tensor([0, 0, 1]))
    with pytest.raises(ConfigError, match="found 5"):
        ours("ArcFaceLoss")(torch.randn(1, DIM), torch.tensor([5]))
    with pytest.raises(ConfigError, match="The loss ArcFaceLoss cannot be computed: "):
        ours("ArcFaceLoss")(torch.randn(1, DIM + 1), torch.tensor([0]))


def test_the_library_is_imported_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, kedge.losses; sys.exit(any(name.startswith('pytorch_metric') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning.losses", None)
    with pytest.raises(ConfigError, match=r"pip install 'kedge\[league\]'"):
        ours("TripletMarginLoss")


def test_the_published_contrastive_loss_equals_a_double_loop() -> None:
    settings = compose(["loss=contrastive_normalized", "loss.arguments.pos_margin=0.2"]).loss
    loss = build_loss(settings, num_classes=CLASSES, dim=DIM)
    embeddings, labels = batch()
    unit = torch.nn.functional.normalize(embeddings, dim=1)
    positive, negative = [], []
    for first in range(len(labels)):
        for second in range(len(labels)):
            distance = (unit[first] - unit[second]).norm()
            if first != second and labels[first] == labels[second]:
                positive.append((distance - 0.2).clamp(min=0))
            elif labels[first] != labels[second]:
                negative.append((1.0 - distance).clamp(min=0))
    expected = sum(torch.stack([term for term in terms if term > 0]).mean() for terms in (positive, negative))
    torch.testing.assert_close(loss(embeddings, labels), expected)
    assert loss.name == "contrastive_normalized"


def test_a_projection_is_trained_and_dropped(tiny: list[str], tmp_path: Path) -> None:
    loss = ours("SupConLoss", projection=3)
    embeddings, labels = batch()
    theirs = losses.SupConLoss()(loss.projection(embeddings), labels)
    torch.testing.assert_close(loss(embeddings, labels), theirs)
    assert [tuple(value.shape) for value in loss.parameters()] == [(DIM, DIM), (DIM,), (3, DIM), (3,)]
    assert tuple(ours("ProxyAnchorLoss", projection=3).loss.proxies.shape) == (CLASSES, 3)
    with pytest.raises(ConfigError, match="projection must be a whole number of at least 1, or null, found 0"):
        ours("SupConLoss", projection=0)
    model = train(overrides=[*tiny, "loss=supcon", "recipe.epochs=1"], folder=tmp_path)
    assert model.normalize
    assert model.encoder.head_kind == "none"
    kept = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert any(name.startswith("loss.projection") for name in kept)
    assert not any("projection" in name for name in model.encoder.state_dict())


@pytest.mark.parametrize("name", ["ArcFaceLoss", "CosFaceLoss", "NormalizedSoftmaxLoss", "ProxyAnchorLoss"])
def test_proxies_classify_as_the_librarys_logits_do(name: str) -> None:
    loss, (embeddings, _) = ours(name), batch(200)
    predicted = loss.predict(embeddings)
    assert loss.predicts_classes
    assert torch.equal(predicted, loss.loss.get_logits(embeddings).argmax(dim=1))
    assert len(predicted.unique()) == CLASSES


@pytest.mark.parametrize("settings", [{"loss": "TripletMarginLoss"}, {"loss": "ArcFaceLoss", "projection": DIM}])
def test_without_proxies_of_its_embeddings_a_loss_knows_no_classes(settings: dict[str, Any]) -> None:
    loss, (embeddings, _) = ours(**settings), batch()
    assert not loss.predicts_classes
    assert loss.predict(embeddings) is None
