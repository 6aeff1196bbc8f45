import lightning
import pytest

from trace_pl.errors import ConfigError
from trace_pl.training.trainer_checks import check_trainer, require_first_devices

REFUSED = [
    ("fit", "limit_train_batches", 0.5, "data.questions_per_epoch"),
    ("fit", "limit_train_batches", 0, "data.questions_per_epoch"),
    ("fit", "limit_train_batches", 1, "data.questions_per_epoch"),  # one micro-batch
    ("fit", "overfit_batches", 1, "data.task"),
    ("fit", "overfit_batches", 0.1, "data.task"),
    ("fit", "reload_dataloaders_every_n_epochs", 0, "data.num_passes"),
    ("fit", "reload_dataloaders_every_n_epochs", 2, "data.num_passes"),
    ("fit", "accumulate_grad_batches", 2, "data.tokens_per_forward"),
    ("fit", "val_check_interval", 0.5, "check_val_every_n_epoch"),
    ("fit", "val_check_interval", 10, "check_val_every_n_epoch"),
    ("fit", "val_check_interval", "00:01:00:00", "check_val_every_n_epoch"),
    ("fit", "check_val_every_n_epoch", None, "limit_val_batches to 0"),
    ("fit", "check_val_every_n_epoch", 0, "limit_val_batches to 0"),
    ("fit", "precision", "16-true", "NaN"),
    ("fit", "limit_val_batches", 0.5, "data.evaluation_questions"),
    ("validate", "limit_val_batches", 0.5, "data.evaluation_questions"),
    ("test", "limit_test_batches", 0.5, "data.test_questions"),
    ("predict", "limit_predict_batches", 0.5, "data.test_questions"),
    ("validate", "limit_val_batches", 0, "data.evaluation_questions"),
    ("test", "limit_test_batches", 0.0, "data.test_questions"),
]

ALLOWED = [
    ("fit", "limit_train_batches", None),
    ("fit", "limit_train_batches", 1.0),
    ("fit", "limit_val_batches", 0),
    ("fit", "limit_val_batches", 0.0),
    ("fit", "limit_val_batches", 7),
    ("fit", "overfit_batches", 0.0),
    ("fit", "val_check_interval", 1.0),
    ("fit", "check_val_every_n_epoch", 3),
    ("fit", "precision", None),
    ("fit", "precision", "bf16-mixed"),
    ("fit", "max_epochs", -1),
    ("validate", "limit_train_batches", 0.5),
    ("validate", "limit_val_batches", 1.0),
    ("test", "limit_test_batches", None),
    ("predict", "limit_predict_batches", 2),
]


@pytest.mark.parametrize(("command", "name", "value", "instead"), REFUSED)
def test_a_setting_that_breaks_the_flow_of_rollouts_names_another(command, name, value, instead):
    with pytest.raises(ConfigError, match=rf"Expected trainer\.{name} of .*, got .*{instead}"):
        check_trainer({name: value}, command)


@pytest.mark.parametrize(("command", "name", "value"), ALLOWED)
def test_a_setting_that_changes_no_step_is_left_alone(command, name, value):
    check_trainer({name: value}, command)


@pytest.mark.parametrize("ids", [[4, 5, 6, 7], [3], [1, 0]])
def test_devices_that_the_engine_would_count_otherwise_are_refused(ids):
    listed = ",".join(map(str, ids))
    with pytest.raises(
        ConfigError, match=rf"CUDA_VISIBLE_DEVICES={listed} .*devices to {len(ids)}\."
    ):
        require_first_devices(ids)


def test_the_first_devices_and_those_of_a_cpu_run_are_taken():
    require_first_devices([0, 1, 2])
    require_first_devices(lightning.Trainer(accelerator="cpu", devices=2, logger=False).device_ids)
