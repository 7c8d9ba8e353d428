"The queue of runs with their status, nbs/results/QUEUE.md: `python _ext/run_queue.py` writes it from the records."
from dataclasses import dataclass

from rvnnbook.lab.papers import PAPERS, Way
from rvnnbook.lab.records import latest, read_records, results_folder, select, sittings
from rvnnbook.lab.verdicts import curve_of, how_ended, trained_in_full


@dataclass(frozen=True)
class Job:
    "One training of the queue, for one or more seeds."
    row: str                           # model, as the papers call it
    way: Way                           # experiment and parameters
    seeds: tuple = (0, 1, 2)
    minutes: float | None = None       # of one core, an epoch

    def command(self, seed: int) -> str:
        "What trains one seed; given again, it resumes."
        return f"{self.way.command('')} -p seed={seed}"

    def status(self, seed: int, records: list[dict]) -> str:
        "How the training of a seed ended, and where; or that it has no record."
        wanted = {"experiment": self.way.experiment, "profile": "paper", "seed": seed}
        found = select(records, **wanted, **self.way.parameters, **self.way.asked)
        if not found:
            return "no record"
        full = [run for run in found if trained_in_full(run, curve_of(run))]
        last = latest(full or found)[-1]
        steps = f" after {last['legs'][-1]['to_step']} steps" if last["legs"] else ""
        most = PAPERS["epochs"].get(self.way.experiment, float("inf"))
        at_end = how_ended(last, curve_of(last)) == "patience" or last["finished"] and (last["parameters"].get("epochs") or 0) >= most
        ended = "finished" if full else "finished with other settings" if at_end else "cut short"
        return f"{ended}{steps} on {sittings([last])[1]}, commit {sittings([last])[0]}"


def read_job(run: dict, common: dict) -> Job:
    "A training of a group, from rvnnbook/lab/papers.yml."
    own = {name: run[name] for name in ("row", "seeds", "minutes") if name in run}
    more = {name: value for name, value in run.items() if name not in own}
    return Job(**own | {"seeds": tuple(own.get("seeds", Job.seeds))}, way=Way(profile="paper", **common, **more))


QUEUE = {group: [read_job(run, found["all"]) for run in found["runs"]] for group, found in PAPERS["queue"].items()}


def queue_page(records: list[dict]) -> str:
    "The queue with the status of every run, as Markdown."
    parts = [PAPERS["queue_page"]["before"]]
    for group, jobs in QUEUE.items():
        lines = ["| row | seed | status | core-minutes an epoch | command |", "|---|---|---|---|---|"]
        for job in jobs:
            cost = "–" if job.minutes is None else f"{job.minutes:g}"
            lines += [f"| {job.row} | {seed} | {job.status(seed, records)} | {cost} | `{job.command(seed)}` |" for seed in job.seeds]
        done = sum(job.status(seed, records).startswith("finished after") for job in jobs for seed in job.seeds)
        parts.append(f"## {group}: {done} of {sum(len(job.seeds) for job in jobs)} finished\n\n" + "\n".join(lines) + "\n")
    return "\n".join([*parts, PAPERS["queue_page"]["after"]])


if __name__ == "__main__":
    (results_folder() / "QUEUE.md").write_text(queue_page(read_records()), encoding="utf8")
