"""What users of other tools type leads to the key here: each suggestion is a command that composes."""

import pytest
from omegaconf import OmegaConf

from lockstep import ROOT
from lockstep.config import checks, compose
from lockstep.config.draft import Draft, advice, unknown_key
from lockstep.errors import UserError

VALUES = {
    "optim={value}": "adam", "schedule={value}": "cosine", "data={value}": "cifar10", "model={value}": "resnet50d", "logger=[csv,{value}]": "wandb",
    "trainer.accelerator={value}": "cpu", "checkpoint.monitor={value}": "val/loss", "compile={value}": "True",
}  # fmt: skip
WORDS = (" to continue", ", or ", ", the global")  # after what is typed


def told(override: str) -> str:
    with pytest.raises(UserError) as error:
        checks.composed("train", [override])
    (problem,) = error.value.problems
    return problem


def typed_for(instead: str) -> str:
    return instead.format(value=VALUES.get(instead, "1"))


@pytest.mark.parametrize("key", ["epochs", "trainer.gpus", "model.name", "logger.wandb.offline", "ckpt_path"])
def test_a_key_of_another_tool_leads_to_the_key_here(key):
    instead = advice()["keys"][key]
    assert (
        told(f"{key}={VALUES.get(instead, '1')}") == f"{key} is not a key of this project. Pass {typed_for(instead)}."
    )


def test_the_page_of_keys_shows_each_answer():
    keys = dict[str, list[str]]()
    for key, instead in advice()["keys"].items():
        keys.setdefault(instead, []).append(f"`{key}`")
    rows = [
        line.strip("| ").split(" | ")
        for line in (ROOT / "docs/keys.md").read_text().split("typed elsewhere")[1].splitlines()[2:]
    ]
    answers = [(", ".join(names), instead.replace("{value}", "…")) for instead, names in keys.items()]
    assert [(typed, here.strip("`")) for typed, here in rows] == answers


@pytest.mark.slow
def test_each_key_of_another_tool_is_answered_when_it_is_typed():
    for key, instead in advice()["keys"].items():
        assert told(f"{key}={VALUES.get(instead, '1')}").endswith(f" Pass {typed_for(instead)}.")


def test_each_key_of_another_tool_has_its_sentence():
    draft = Draft(compose.compose_config("train", []))  # composing each takes a minute
    for key, instead in advice()["keys"].items():
        said = unknown_key(draft, key, VALUES.get(instead, "1"))
        assert said == f"{key} is not a key of this project. Pass {typed_for(instead)}."


@pytest.mark.slow
@pytest.mark.parametrize(
    "instead", sorted({i for i in advice()["keys"].values() if not i.startswith(("nothing", "the network"))})
)
def test_each_suggestion_composes(instead):
    typed = typed_for(instead)
    for words in WORDS:
        typed = typed.partition(words)[0]
    words = typed.replace("<name>", "resnet18").replace("<steps>", "5").split()
    cfg = checks.composed("train", words)
    for key, _, value in (word.partition("=") for word in words):
        if not compose.is_group(f"{key}="):
            assert str(OmegaConf.select(cfg, key.lstrip("+"))).lower() == value.lower()


@pytest.mark.parametrize(("typed", "key"), [
    ("lr=0.1", "optim.lr"), ("batch_size=32", "loader.batch_size"), ("max_epochs=5", "trainer.max_epochs"), ("devices=2", "trainer.devices"),
    ("precision=16", "trainer.precision"), ("num_workers=4", "loader.num_workers"), ("weight_decay=0.1", "optim.weight_decay"),
    ("momentum=0.9", "optim.momentum"), ("accumulate_grad_batches=4", "trainer.accumulate_grad_batches"),
    ("gradient_clip_val=1", "trainer.gradient_clip_val"), ("label_smoothing=0.1", "task.label_smoothing"),
])  # fmt: skip
def test_a_key_without_its_group_leads_to_the_one_within(typed, key):
    assert f"did you mean {key}? " in told(typed)


@pytest.mark.parametrize(("typed", "instead"), [
    ("data.validation_split=0.2", "loader.val_fraction=0.2"), ("model.epochs=3", "trainer.max_epochs=3"), ("data=../animals", "data.root=../animals"),
])  # fmt: skip
def test_a_key_of_another_tool_within_a_group_leads_to_the_key_here(typed, instead):
    assert instead in told(typed)


def test_a_group_that_is_chosen_twice_is_not_combined_in_silence(capsys):
    cfg = checks.resolve(["augment=mixup", "augment=[flip,crop]"])
    assert set(cfg.augment) == {"flip", "crop"}
    assert "of augment=mixup augment=[flip,crop], only the last applies" in capsys.readouterr().err


@pytest.mark.parametrize(("typed", "instead"), [
    ("model=resnet18", "model=timm model.name=resnet18"), ("data=./photos", "data=folder data.root=./photos"),
    ("data=imagenet", "data=torchvision data.dataset=imagenet"),
])  # fmt: skip
def test_an_unknown_option_leads_to_the_one_that_takes_such_names(typed, instead):
    assert instead in told(typed)
    checks.composed("train", instead.split())


def test_what_a_list_lacks_is_named_alone():
    assert "callbacks has no option emma; use one of" in told("callbacks=[default,emma]")


def test_a_short_name_with_one_wrong_letter_leads_to_one_of_its_length():
    assert "(did you mean ddp?)" in told("strategy=dpp")
