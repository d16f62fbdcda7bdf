"""Search for the settings of a run: trials of one recipe on the same people, judged after every epoch.

One module imports Optuna. Every trial depends only on the seed, its number and the trials before it, and every run on
its settings, so that a search that was stopped continues as if it had not been.
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from models.vision.detection import Detector
from training import distributed
from training.bounds import fixed_scale
from training.config import ConfigError, RunConfig
from training.data.identities import list_identities
from training.errors import NonFiniteLossError, RunInterruptedError
from training.evaluation import plots
from training.losses import HEADS, list_options
from training.optimization.logs import Measured
from training.optimization.objective import build_losses
from training.optimization.run_folder import CHECKPOINT, VALIDATION, load_checkpoint
from training.recipes import flatten
from training.run.train import train_recognizer

Sampling = Literal["tpe", "random", "grid"]
State = Literal["complete", "pruned", "unfinished", "failed"]
"""In the order of a table of results."""
Space = Mapping[str, BaseDistribution]
"""Searched settings: ``section.key`` and its range or choices."""
JOURNAL: Final = "journal.log"
TABLE: Final = "trials.csv"
PICTURE: Final = "trials.png"
BEST: Final = "best.json"
STUDY: Final = "settings"
PAPERS_SCALE: Final = 64.0
DEFAULT_MARGINS: Final = (0.0, 0.5)
RANDOM_TRIALS: Final = 8
"""Trials drawn at random before TPE models the others (J. Bergstra et al., 2011)."""
UNPRUNED_TRIALS: Final = 4
"""Trials that run to their end before others are compared with their median."""
MAX_CHECKED: Final = 256
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SearchPlan:
    """Bounds and order of a search: ``trials`` in all, ``minutes`` of one call (None: no limit)."""

    sampling: Sampling = "tpe"
    trials: int = 20
    minutes: float | None = None
    seed: int = 7

    def __post_init__(self) -> None:
        if self.sampling not in get_args(Sampling):
            raise ConfigError(f"sampler {self.sampling!r} is not one of {', '.join(get_args(Sampling))}")


@dataclass(frozen=True)
class Trial:
    """One trial: ``objective`` is that of its last epoch (higher is better), None before the first one ended."""

    number: int
    state: State
    objective: float | None
    epochs: int
    settings: Mapping[str, float | int | str]
    error: str = ""


class _OutOfTimeError(Exception):
    """The minutes of this call are over. The trial continues in the next one."""


def objective(figures: Mapping[str, Measured]) -> float:
    """Return what a search maximizes, from the figures that a run measures after an epoch.

    It is the mean of the accuracies, otherwise the TAR of the held-out people at the smallest FAR that they are enough
    for, otherwise their rank-1, otherwise the negative loss of the distillation on held-out images. Raises ConfigError
    if there is none.
    """
    values = {name: value[0] if isinstance(value, tuple) else value for name, value in figures.items()}
    if accuracies := [value for name, value in values.items() if name.endswith("accuracy")]:
        return sum(accuracies) / len(accuracies)
    if rates := [value for name, value in values.items() if name.startswith("held-out people TAR")]:
        return rates[-1]
    if ranks := [value for name, value in values.items() if name.startswith("held-out people rank-1")]:
        return ranks[0]
    if losses := [value for name, value in values.items() if name.endswith("held-out distillation loss")]:
        return -sum(losses) / len(losses)
    raise ConfigError(
        "a search compares trials by what a run measures after every epoch. Hold people out with --set "
        "data.held_out_people=SHARE (ten people or more), name a set of pairs with --set validation=a.bin, or hold "
        "images out with --teacher PACK --set distill.held_out=500"
    )


def parse_range(text: str, config: RunConfig) -> tuple[str, BaseDistribution]:
    """Parse ``KEY=LOW:HIGH`` or ``KEY=LOW:HIGH:log``. Whole numbers are searched if both ends are whole, unless the
    setting holds a fraction in ``config`` or by default. Raises ConfigError on other text or an empty range."""
    key, _, given = text.partition("=")
    low_text, _, rest = given.partition(":")
    high_text, colon, scale = rest.partition(":")
    log_scale = scale == "log"
    try:
        low, high = float(low_text), float(high_text)
    except ValueError:
        low = high = math.nan
    if not (key and math.isfinite(low) and math.isfinite(high)) or (colon and not log_scale):
        raise ConfigError(f"--range needs KEY=LOW:HIGH or KEY=LOW:HIGH:log, not {text!r}")
    if low >= high or (log_scale and low <= 0):
        raise ConfigError(f"--range {text}: LOW must be below HIGH, and above 0 with log")
    whole = low == int(low) and high == int(high) and "." not in given and not isinstance(_present(config, key), float)
    if whole:
        return key, IntDistribution(int(low), int(high), log=log_scale)
    return key, FloatDistribution(low, high, log=log_scale)


def parse_choice(text: str) -> tuple[str, BaseDistribution]:
    """Parse ``KEY=A,B,C``. Raises ConfigError if there are fewer than two different values."""
    key, _, given = text.partition("=")
    values = given.split(",")
    if not key or "" in values or len(set(values)) != len(values) or len(values) < 2:
        raise ConfigError(f"--choice needs KEY=A,B,C with two or more different values, not {text!r}")
    return key, CategoricalDistribution(values)


def default_space(config: RunConfig, people: int) -> Space:
    """Return ranges of those of scale and margin that the head has: the scale from ln(C-1), below which the right class
    cannot reach P = 1/2 against classes at right angles, to the papers' 64. Raises ConfigError if it has neither."""
    options = list_options(HEADS[config.head.name])
    space: dict[str, BaseDistribution] = {}
    if "scale" in options:
        space["head.scale"] = FloatDistribution(round(fixed_scale(max(3, people), 0.0), 1), PAPERS_SCALE, log=True)
    if "margin" in options:
        space["head.margin"] = FloatDistribution(*DEFAULT_MARGINS)
    if not space:
        raise ConfigError(
            f"head {config.head.name} has no scale or margin. Name what to search with --range or --choice"
        )
    return space


def search(
    config: RunConfig, given: Sequence[str], choices: Sequence[str], plan: SearchPlan, detector: Detector | None = None
) -> list[Trial]:
    """Run or continue a search in ``config.output``, and return its trials, the best first.

    After every trial the folder has a table and the best trial's settings, and only that trial's checkpoint; at the end
    of a call, a picture.

    Args:
        config: settings that the trials share.
        given, choices: texts as of `parse_range` and `parse_choice`; without any, `default_space`.
        detector: for unaligned photos.

    Raises:
        ConfigError: a setting is invalid, nothing is measured after an epoch, or the folder has another search.
        RunInterruptedError: Ctrl-C or SIGTERM arrived. The trial in progress was saved.
    """
    if distributed.configured_world_size() > 1:
        raise ConfigError("a search runs in one process. Start it without torchrun")
    if not (config.validation or config.data.held_out_people or config.distill.held_out):
        objective({})
    listed = list_identities(config.data)
    pairs = [*(parse_range(text, config) for text in given), *map(parse_choice, choices)]
    if len(dict(pairs)) < len(pairs):
        raise ConfigError("a setting has more than one --range or --choice")
    space = dict(pairs) or default_space(config, len(listed.names))
    grid = _grid(space, plan.trials) if plan.sampling == "grid" else None
    _check(config, space)
    settings = {
        "run": {
            key: value for key, value in flatten(config.as_dict()).items() if key not in ("output", "data.workers")
        },
        "space": {key: optuna.distributions.distribution_to_json(space[key]) for key in space},
        "search": {"sampler": plan.sampling, "seed": plan.seed, "grid": grid},
        "data": {"people": len(listed.names), "images": len(listed)},
    }
    config.output.mkdir(parents=True, exist_ok=True)
    storage = JournalStorage(JournalFileBackend(str(config.output / JOURNAL)))
    study = _open_study(config, storage, settings)
    deadline = math.inf if plan.minutes is None else time.monotonic() + 60 * plan.minutes
    try:
        for number in range(plan.trials if grid is None else len(grid)):
            if number < len(study.trials) and study.trials[number].state.is_finished():
                continue
            if time.monotonic() > deadline:
                break
            study.sampler = _sampler(plan, number, grid)
            _run_trial(study, _begin(study, storage, number), config, space, detector, deadline)
            _write_table(study, config, space)
    except _OutOfTimeError:
        log.info("the minutes of this call are over. Run the same command again to continue")
    finally:
        _write_table(study, config, space)
        _draw(study, config.output, space)
    return list_trials(study)


def _open_study(config: RunConfig, storage: JournalStorage, settings: Mapping[str, Any]) -> optuna.Study:
    """Create or load the study. Raises ConfigError if it was started with other settings."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        storage=storage,
        study_name=STUDY,
        direction="maximize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(UNPRUNED_TRIALS, n_warmup_steps=config.loop.epochs // 4 + 1),
    )
    now = json.loads(json.dumps(settings))
    before = study.user_attrs.get("settings", now)
    changed = [
        key
        for part in now
        for key in sorted({*before[part], *now[part]})
        if before[part].get(key) != now[part].get(key)
    ]
    if changed:
        raise ConfigError(
            f"{config.output} has a search with other settings ({', '.join(changed)}). Choose another --output"
        )
    study.set_user_attr("settings", now)
    return study


def _sampler(plan: SearchPlan, number: int, grid: list[dict[str, Any]] | None) -> optuna.samplers.BaseSampler:
    if grid is not None:
        return _GridSampler(grid)
    seed = int(np.random.SeedSequence((plan.seed, number)).generate_state(1)[0])
    if plan.sampling == "random":
        return optuna.samplers.RandomSampler(seed)
    return optuna.samplers.TPESampler(n_startup_trials=RANDOM_TRIALS, seed=seed)


class _GridSampler(optuna.samplers.BaseSampler):  # type: ignore[misc]  # mypy sees no Optuna
    """Point of a grid by the number of the trial. Optuna's own draws points at random, so that a search which was
    stopped would continue with others."""

    def __init__(self, grid: Sequence[Mapping[str, Any]]) -> None:
        self._grid = grid

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return {}

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        return {}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        return self._grid[trial.number][param_name]


def _grid(space: Space, trials: int) -> list[dict[str, Any]]:
    """Return the points of the finest grid of at most ``trials``: as many values of every range, ends included. Raises
    ConfigError if two values of every range are too many."""

    def points(values: int) -> list[dict[str, Any]]:
        axes = [_values(distribution, values) for distribution in space.values()]
        return [dict(zip(space, point, strict=True)) for point in itertools.product(*axes)]

    sizes = {n: math.prod(len(_values(d, n)) for d in space.values()) for n in range(2, trials + 1)}
    fitting = [n for n, size in sizes.items() if size <= trials]
    if not fitting:
        least = math.prod(len(_values(d, 2)) for d in space.values())
        raise ConfigError(f"a grid over these settings has {least} points or more. Raise --trials")
    return points(max(fitting))


def _values(distribution: BaseDistribution, count: int) -> list[Any]:
    """Return all choices, or ``count`` values of a range, evenly spaced on its scale."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    if not isinstance(distribution, FloatDistribution | IntDistribution):
        raise TypeError(f"no values for {distribution}")
    low, high = distribution.low, distribution.high
    spaced = np.geomspace(low, high, count) if distribution.log else np.linspace(low, high, count)
    if isinstance(distribution, IntDistribution):
        return sorted({round(value) for value in spaced.tolist()})
    return [min(max(value, low), high) for value in spaced.tolist()]


def _check(config: RunConfig, space: Space) -> None:
    """Raise ConfigError if a corner of the space is no valid setting, before anything trains."""
    corners = itertools.product(*(_values(distribution, 2) for distribution in space.values()))
    for corner in itertools.islice(corners, MAX_CHECKED):
        build_losses(_configured(config, dict(zip(space, corner, strict=True))), num_classes=64)


def _configured(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return config.overridden(texts)


def _run_trial(
    study: optuna.Study,
    trial: optuna.Trial,
    config: RunConfig,
    space: Space,
    detector: Detector | None,
    deadline: float,
) -> None:
    """Train one trial, from its checkpoint if it was stopped, and store its end."""
    number = trial.number
    run = replace(
        _configured(config, {key: _suggest(trial, key, space[key]) for key in space}),
        output=config.output / "trials" / f"{number:03d}",
    )
    epochs = itertools.count(_epochs_done(run.output) + 1)

    def observe(figures: Mapping[str, Measured]) -> None:
        epoch, value = next(epochs), objective(figures)
        if not math.isfinite(value):
            return  # the run stops with an error that says where
        if epoch not in _stored(study, number).intermediate_values:
            trial.report(value, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
        if time.monotonic() > deadline and epoch < run.loop.epochs:
            raise _OutOfTimeError

    try:
        train_recognizer(run, detector, observe)
    except optuna.TrialPruned:
        study.tell(trial, state=TrialState.PRUNED)
    except NonFiniteLossError as error:
        trial.set_user_attr("error", str(error))
        study.tell(trial, state=TrialState.FAIL)
    except RunInterruptedError as error:
        raise RunInterruptedError(f"stopped in trial {number}. Run the same command again to continue") from error
    else:
        values = _stored(study, number).intermediate_values
        study.tell(trial, values[max(values)])
    log.info("trial %d: %s", number, list_trials(study, number)[0])


def _begin(study: optuna.Study, storage: JournalStorage, number: int) -> optuna.Trial:
    """Return a new trial, or the one with this number, which was stopped."""
    if number == len(study.trials):
        return study.ask()
    study_id = storage.get_study_id_from_name(STUDY)
    return optuna.Trial(study, storage.get_trial_id_from_study_id_trial_number(study_id, number))


def _stored(study: optuna.Study, number: int) -> FrozenTrial:
    return study.get_trials(deepcopy=False)[number]


def _suggest(trial: optuna.Trial, key: str, distribution: BaseDistribution) -> float | int | str:
    match distribution:
        case IntDistribution(low=low, high=high, log=log_scale):
            return int(trial.suggest_int(key, low, high, log=log_scale))
        case FloatDistribution(low=low, high=high, log=log_scale):
            return float(trial.suggest_float(key, low, high, log=log_scale))
        case CategoricalDistribution(choices=choices):
            return str(trial.suggest_categorical(key, choices))
        case _:
            raise TypeError(f"no value for {distribution}")


def _epochs_done(output: Path) -> int:
    """Return the number of epochs up to the checkpoint of a run."""
    if not (output / CHECKPOINT).exists() or not (output / VALIDATION).exists():
        return 0
    step = int(load_checkpoint(output / CHECKPOINT)["step"])
    with (output / VALIDATION).open(newline="", encoding="utf-8") as stream:
        # A run that was killed may have left half a line.
        return len({row["step"] for row in csv.DictReader(stream) if row["value"] and int(row["step"]) <= step})


def list_trials(study: optuna.Study, number: int | None = None) -> list[Trial]:
    """Return the trials, complete ones first, each group by falling objective; or only the one with this number."""
    states: dict[TrialState, State]
    states = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
    trials = []
    for frozen in study.get_trials(deepcopy=False):
        values = frozen.intermediate_values
        epochs = max(values, default=0)
        last = values.get(epochs)
        state: State = states.get(frozen.state, "unfinished")
        trials.append(Trial(frozen.number, state, last, epochs, frozen.params, frozen.user_attrs.get("error", "")))
    order = get_args(State)
    found = sorted(trials, key=lambda t: (order.index(t.state), math.inf if t.objective is None else -t.objective))
    return [trial for trial in found if number in (None, trial.number)]


def _write_table(study: optuna.Study, config: RunConfig, space: Space) -> None:
    """Write table and best settings, and remove the checkpoints of other finished trials."""
    trials = list_trials(study)
    partial = config.output / f"{TABLE}.partial"
    with partial.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(("trial", "state", "objective", "epochs", *space, "error"))
        for t in trials:
            chosen = (t.settings.get(key) for key in space)
            writer.writerow((t.number, t.state, t.objective, t.epochs, *chosen, t.error))
    partial.rename(config.output / TABLE)
    if not trials or trials[0].state != "complete":
        return
    best = _configured(config, trials[0].settings).as_dict()
    del best["output"]
    partial = config.output / f"{BEST}.partial"
    partial.write_text(json.dumps(best, indent=2) + "\n", encoding="utf-8")
    partial.rename(config.output / BEST)
    for t in trials[1:]:
        if t.state != "unfinished":
            (config.output / "trials" / f"{t.number:03d}" / CHECKPOINT).unlink(missing_ok=True)


def _draw(study: optuna.Study, output: Path, space: Space) -> None:
    measured = [t for t in list_trials(study) if t.objective is not None and t.state in ("complete", "pruned")]
    if not measured:
        return
    logarithmic = {key for key, d in space.items() if isinstance(d, FloatDistribution | IntDistribution) and d.log}
    figure = plots.objective_by_setting(
        np.array([t.objective for t in measured]),
        {key: [t.settings[key] for t in measured] for key in space},
        np.array([t.state == "complete" for t in measured]),
        logarithmic,
    )
    (output / PICTURE).write_bytes(plots.png(figure))


def _present(config: RunConfig, key: str) -> Any:
    """Return the value of a setting, that of a head's option by default included."""
    defaults = {f"head.{name}": value for name, value in list_options(HEADS[config.head.name]).items()}
    return {**defaults, **flatten(config.as_dict())}.get(key)
