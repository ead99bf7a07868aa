import json

import pytest
from huggingface_hub import ModelCard
from trainings import train_notices

from luffy.run_folder.checkpoint import Checkpoint, file_entry, manifest_text
from luffy.trainer import Trainer


def test_a_checkpoint_has_the_card_of_its_model_and_no_path_of_this_machine(make_config, sums, tiny_model):
    cfg = make_config(
        model={"lora": {"rank": 2}}, data={"eval": str(sums)}, eval={"every": 1, "limit": 3},
        train={"steps": 2, "save_every": 1}, name="group/mine",
    )  # fmt: skip
    train_notices(cfg)
    for step in (1, 2):
        checkpoint = Checkpoint(cfg.folder / "checkpoints" / f"step-{step:06d}")
        assert checkpoint.verify() == []
        text = (checkpoint.model / "README.md").read_text()
        rows = [line for line in text.splitlines() if line.startswith("| 1 ") or line.startswith("| 2 ")]
        assert len(rows) == step and "# group-mine" in text
        assert "| held-out, during training | 3 |" in text and "24 problems, 16 with traces" in text
        adapter = (checkpoint.adapter / "README.md").read_text()
        assert ModelCard(text).data.library_name == "transformers" and ModelCard(adapter).data.library_name == "peft"
        for told in (text, adapter):
            assert str(cfg.folder.parent) not in told and str(tiny_model.parent) not in told
    manifest = json.loads((checkpoint.path / "manifest.json").read_text())["files"]
    assert not [name for name in manifest if name.endswith("README.md")]


@pytest.mark.parametrize("listed", [False, True])
def test_a_card_is_never_damage(make_config, listed):
    """``listed``: as in a checkpoint of before, whose manifest has the card that peft wrote."""
    cfg = make_config(train={"steps": 2, "save_every": 1})
    train_notices(cfg)
    checkpoint = Checkpoint(cfg.folder / "checkpoints" / "step-000002")
    card = checkpoint.model / "README.md"
    if listed:
        path = checkpoint.path / "manifest.json"
        files = json.loads(path.read_text())["files"] | {"model/README.md": file_entry(card)}
        path.write_text(manifest_text(files))
        assert checkpoint.verify() == []
    card.write_text("my own words")
    (checkpoint.model / "curves.png").write_bytes(b"a figure")
    assert checkpoint.verify() == []
    card.unlink()
    assert checkpoint.verify() == []
    said = train_notices(make_config(train={"steps": 3, "save_every": 1}))
    assert not [line for line in said if "ignored" in line or "damaged" in line]
    assert (cfg.folder / "checkpoints" / "step-000003" / "model" / "README.md").is_file()


def test_a_card_that_cannot_be_made_costs_one_warning(make_config, capsys):
    cfg = make_config(train={"steps": 2, "save_every": 2})
    with Trainer(cfg) as trainer:
        for step, _ in trainer.steps():
            if step == 1:
                with (cfg.folder / "metrics.jsonl").open("a") as file:
                    file.write("no JSON\n")
    checkpoint = Checkpoint(cfg.folder / "checkpoints" / "step-000002")
    assert checkpoint.verify() == [] and not (checkpoint.model / "README.md").exists()
    assert "step-000002 has no model card: UserError" in "".join(capsys.readouterr().err.split("\n"))
