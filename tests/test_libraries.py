"""Libraries that compile for their users, with their own code and after fusee.install()."""

from __future__ import annotations

import copy
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusee
import tests.models.torchvision_setup  # noqa: F401  # transformers and timm import torchvision
from fusee import log
from fusee.errors import FuseeWarning

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings(f"error::{FuseeWarning.__module__}.FuseeWarning"),
]


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the graphs that our compiler made, of their generated functions."""
    found: list[str] = []
    stock = torch.compile
    undo = log.subscribe(lambda record: found.append(record.graph), "host")
    fusee.install()
    yield found
    fusee.uninstall()
    torch.compile = (
        stock  # Lightning, when imported, puts a function of its own around what it finds
    )
    undo()


def same(one: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()))


# ------------------------------------------------------------------------------ accelerate


def test_accelerate_compiles_with_our_name(compiled: list[str], tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin

    def trained(**given: Any) -> nn.Module:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
        accelerator = Accelerator(cpu=True, **given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(2):
            accelerator.backward(model(torch.ones(3, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.save_model(model, str(tmp_path))
        unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
        assert isinstance(unwrapped, nn.Sequential)
        return unwrapped

    eager = trained()
    assert not compiled
    same(eager, trained(dynamo_backend="fusee"))
    assert len(compiled) == 2  # forward and backward
    plugin = TorchDynamoPlugin(
        backend="FUSEE", mode="reduce-overhead", use_regional_compilation=True
    )
    same(eager, trained(dynamo_plugin=plugin))
    assert len(compiled) > 2 and plugin.backend is DynamoBackend("FUSEE")
    assert "FUSEE" in DynamoBackend.list() and "FUSEE" in DynamoBackend
    fusee.uninstall()
    assert "FUSEE" not in DynamoBackend.list() and not hasattr(DynamoBackend, "FUSEE")
    with pytest.raises(ValueError, match="FUSEE"):
        TorchDynamoPlugin(backend="fusee")
    assert DynamoBackend("INDUCTOR") is DynamoBackend.INDUCTOR


# ------------------------------------------------------------------------------ transformers


def test_trainer_takes_our_name(compiled: list[str], tmp_path: Path) -> None:
    from accelerate.state import AcceleratorState
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(8) + k, "labels": torch.tensor(k % 2)} for k in range(8)]

    def trained(**given: Any) -> nn.Module:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.manual_seed(0)
        model = BertForSequenceClassification(config)
        arguments = TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[], max_steps=2, save_strategy="no",
            per_device_train_batch_size=4, disable_tqdm=True, logging_strategy="no", **given,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
        assert isinstance(
            BertForSequenceClassification.from_pretrained(tmp_path / "saved"), nn.Module
        )
        return model

    eager = trained()
    assert not compiled
    same(eager, trained(torch_compile=True, torch_compile_backend="fusee"))
    assert len(compiled) == 2
    with pytest.raises(ValueError, match="FUSE"):
        trained(torch_compile=True, torch_compile_backend="fuse")


# ------------------------------------------------------------------------------ Lightning


def lightning_module() -> Any:
    from pytorch_lightning import LightningModule

    class Lit(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = self.layer(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    return Lit()


def test_lightnings_trainer_compiles_the_steps(compiled: list[str]) -> None:
    from pytorch_lightning import Trainer
    from pytorch_lightning.utilities.compile import to_uncompiled

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 4)), 2)

    def trained(wrapped: Callable[[Any], Any]) -> Any:
        module = lightning_module()
        trainer = Trainer(
            max_steps=2, logger=False, enable_checkpointing=False, accelerator="cpu",
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(wrapped(module), data)
        assert trainer.global_step == 2
        return module

    eager = trained(lambda module: module)
    assert not compiled
    made = trained(torch.compile)
    same(eager, made)
    assert len(compiled) >= 2
    before = len(compiled)
    same(eager, trained(fusee.compile))
    assert len(compiled) == 2 * before
    assert vars(to_uncompiled(made))["training_step"].__func__ is type(made).training_step
    fusee.uninstall()
    stock = torch.compile(nn.Linear(2, 2), backend="eager")  # Lightning has put its own around
    assert isinstance(stock, torch._dynamo.OptimizedModule)


def test_fabric_takes_a_compiled_module(compiled: list[str]) -> None:
    from lightning_fabric import Fabric

    def trained(wrapped: Callable[[Any], Any]) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
        fabric = Fabric(accelerator="cpu")
        made, optimizer = fabric.setup(wrapped(model), torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            fabric.backward(made(torch.ones(3, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert list(made.state_dict()) == list(model.state_dict())
        return model

    same(trained(lambda module: module), trained(torch.compile))
    assert len(compiled) == 2


# ------------------------------------------------------------------------------ diffusers


def test_a_pipeline_of_diffusers(compiled: list[str], tmp_path: Path) -> None:
    diffusers: Any = importlib.import_module("diffusers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8,),
        norm_num_groups=4, down_block_types=("DownBlock2D",), up_block_types=("UpBlock2D",),
    ).eval()  # fmt: skip

    def drawn(model: Any) -> Tensor:
        pipe = diffusers.DDPMPipeline(
            unet=model, scheduler=diffusers.DDPMScheduler(num_train_timesteps=4)
        )
        pipe.set_progress_bar_config(disable=True)
        made = pipe(
            generator=torch.Generator().manual_seed(0), num_inference_steps=2, output_type="np"
        )
        pipe.save_pretrained(tmp_path)
        return torch.as_tensor(made.images)

    wanted = drawn(unet)
    assert not compiled
    torch.testing.assert_close(drawn(torch.compile(unet, mode="max-autotune")), wanted)
    assert compiled
    again = copy.deepcopy(unet)
    again.compile(fullgraph=True)
    before = len(compiled)
    torch.testing.assert_close(drawn(again), wanted)
    assert len(compiled) > before
    assert isinstance(diffusers.DDPMPipeline.from_pretrained(tmp_path).unet, type(unet))


# ------------------------------------------------------------------------------ timm


def test_timms_training_loop(compiled: list[str]) -> None:
    timm: Any = importlib.import_module("timm")
    utils: Any = importlib.import_module("timm.utils")
    optim: Any = importlib.import_module("timm.optim")
    images, labels = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32), torch.arange(2)

    def trained(backend: str | None) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = timm.create_model("test_vit", num_classes=4, img_size=32)
        optimizer = optim.create_optimizer_v2(model, opt="sgd", lr=0.05)
        ema = utils.ModelEmaV3(model, decay=0.5)
        if backend is not None:  # as its train.py does
            torch._dynamo.reset()
            model = torch.compile(model, backend=backend, mode="default")
            ema = torch.compile(ema, backend=backend)
        for _ in range(2):
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update(model)
        return utils.get_state_dict(model), utils.get_state_dict(ema, utils.unwrap_model)

    wanted = trained(None)
    assert not compiled
    found = trained("fusee")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert compiled and list(found[0]) == list(wanted[0])


# ------------------------------------------------------------------------------ TorchServe


MODEL = """
from torch import nn

class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 4), nn.GELU())
"""


@pytest.mark.parametrize(
    "config", [{"compile": {"enable": True, "backend": "fusee", "mode": "max-autotune"}}, "fusee"]
)
def test_torchserve_compiles_with_our_name(
    compiled: list[str], tmp_path: Path, config: Any
) -> None:
    from ts.context import Context
    from ts.torch_handler.base_handler import BaseHandler
    from ts.utils import util

    (tmp_path / "served.py").write_text(MODEL)
    manifest = {"model": {"modelFile": "served.py"}}
    context = Context("m", str(tmp_path), manifest, 1, None, "1", model_yaml_config={"pt2": config})
    handler = BaseHandler()
    sys.path.insert(0, str(tmp_path))
    try:
        handler.initialize(context)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("served", None)
    found = handler.inference(torch.ones(2, 4))
    assert len(compiled) == 1
    torch.testing.assert_close(found, handler.model._orig_mod(torch.ones(2, 4)))
    fusee.uninstall()
    assert not util.check_valid_pt2_backend("fusee") and util.check_valid_pt2_backend("inductor")


# ------------------------------------------------------------------------------ when


WHEN = """
import sys, fusee
if sys.argv[1] == "before":
    import accelerate.utils.dataclasses
fusee.install()
assert sys.argv[1] == "before" or "accelerate" not in sys.modules
from accelerate.utils.dataclasses import DynamoBackend
assert DynamoBackend("FUSEE").value == "FUSEE"
fusee.uninstall()
assert not hasattr(DynamoBackend, "FUSEE")
print("ok")
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_libraries_may_be_imported_before_or_after(when: str) -> None:
    pytest.importorskip("accelerate")
    ended = subprocess.run([sys.executable, "-c", WHEN, when], capture_output=True, text=True)
    assert ended.stdout == "ok\n", ended.stderr
