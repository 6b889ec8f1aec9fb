"""A scheduler of one's own: first come, first served, room for the whole answer. See docs/own-scheduler.md.

python -m services up --without scheduler; python docs/examples/own_scheduler.py .run
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import nats
from msgpack import packb, unpackb

CMD, EVT, STEPS, MOST, QUEUE = "kvasir.v1.cmd", "kvasir.v1.evt", 8, 16, 1000
ME = {"scheduler_id": "own-0", "incarnation": time.time_ns(), "epoch": 0, "policy": "own"}
queue, workers = {}, {}  # (request, choice) → job; worker id → what is known of it


def key(job):
    return job["ref"]["request_id"], job["ref"]["choice"]


def blocks(worker, job):
    return -(-job["limit"] // worker["beat"]["block_tokens"])


def free(worker):
    taken = sum(blocks(worker, job) for job in worker["jobs"].values())
    return worker["beat"]["capacity"]["total_blocks"] - taken


async def on_submit(msg):
    spec = unpackb(msg.data)["spec"]
    prompt, done = len(spec["prompt"]) // 4, len(spec.get("generated", b"")) // 4
    limit = prompt + spec["sampling"]["max_tokens"]
    job = {"spec": spec, "ref": spec["ref"], "end": prompt + done, "limit": limit}
    held = [jobs[key(job)] for jobs in (queue, *(w["jobs"] for w in workers.values())) if key(job) in jobs]
    known = any(other["ref"]["attempt"] >= spec["ref"]["attempt"] for other in held)
    if not known and len(queue) >= QUEUE:
        error = packb({"code": "overloaded", "message": "the queue is full", "retry_after_s": 1.0})
        return await bus.publish(msg.reply, error, headers={"Nats-Service-Error": "the queue is full"})
    if not known:
        await forget(job)
        queue[key(job)] = job
    await bus.publish(msg.reply, packb({**ME, "known": known}))
    await plan()


async def on_cancel(msg):
    await forget(unpackb(msg.data))


async def forget(job):  # this attempt and lower ones
    for name, jobs in [("", queue), *((name, worker["jobs"]) for name, worker in workers.items())]:
        if key(job) in jobs and jobs[key(job)]["ref"]["attempt"] <= job["ref"]["attempt"]:
            old = jobs.pop(key(job))
            await bus.publish(f"{CMD}.worker.cancel.{name}", packb({"ref": old["ref"]})) if name else None


async def on_reported(msg):  # a heartbeat
    beat = unpackb(msg.data)
    worker = workers.setdefault(beat["worker_id"], {"jobs": {}, "in_step": False, "beat": beat})
    if worker["beat"]["incarnation"] != beat["incarnation"]:
        await lose(worker, [])
    worker.update(beat=beat, heard_s=time.monotonic())


async def on_stepped(msg):
    step = unpackb(msg.data)
    worker = workers.get(step["worker_id"])
    if worker and worker["in_step"] and step["seq"] > worker["stepped"]:
        skips = step.get("skipped", [])
        for job in (*step.get("ended", []), *(skip for skip in skips if skip["reason"] == "unknown")):
            if worker["jobs"].get(key(job), {}).get("ref") == job["ref"]:
                del worker["jobs"][key(job)]
        as_planned = step.get("outcome", "ran") == "ran" and all(s["reason"] == "unknown" for s in skips)
        worker["in_step"] = as_planned and step["seq"] == worker["stepped"] + 1
        worker.update(stepped=step["seq"], busy=not step["plan_over"], active_s=time.monotonic())
        await plan()


async def lose(worker, refs):  # gateways submit these again, with what they have of the answer
    refs = [*refs, *(job["ref"] for job in worker["jobs"].values())]
    worker.update(jobs={}, in_step=False)
    names = {name: worker["beat"][name] for name in ("worker_id", "incarnation")}
    await bus.publish(f"{EVT}.scheduler.lost", packb({**names, "refs": refs})) if refs else None


async def resync(name, worker):  # the one way into step: the worker gives up all plans, and starts anew
    try:
        reply = await bus.request(f"{CMD}.worker.snapshot.{name}", packb({"epoch": ME["epoch"]}), timeout=2)
        found = unpackb(reply.data)
        left = [seq["ref"] for seq in found.get("sequences", []) if seq["state"] != "ended"]
    except (nats.errors.Error, KeyError):
        return
    await lose(worker, left)
    worker.update(drops=left, stepped=found["stepped_seq"], seq=0, busy=False, in_step=True)


async def plan():
    while queue and (ready := [worker for worker in workers.values() if worker["in_step"]]):
        worker, first = max(ready, key=free), next(iter(queue.values()))
        if blocks(worker, first) > free(worker) or len(worker["jobs"]) >= MOST:
            break
        worker["jobs"][key(first)] = queue.pop(key(first))
    for name, worker in list(workers.items()):
        if worker["in_step"] and worker["jobs"] and not worker["busy"]:
            worker.update(seq=worker["seq"] + 1, busy=True, active_s=time.monotonic())
            await bus.publish(f"{CMD}.worker.plan.{name}", packb(next_plan(worker)))


def next_plan(worker):
    jobs = worker["jobs"].values()
    new = [job for job in jobs if "spec" in job]
    items = {key(job): {"ref": job["ref"], "allocated_blocks": blocks(worker, job)} for job in jobs}
    return {
        "epoch": ME["epoch"],
        "seq": worker["seq"],
        "steps": STEPS,
        "drops": worker.pop("drops", []),
        "starts": [job.pop("spec") for job in new],
        "prefills": [{**items[key(job)], "first_token": 0, "end_token": job["end"]} for job in new],
        "decodes": list(items.values()),
    }


async def main(run_dir):
    global bus
    url = json.loads((run_dir / "state.json").read_text())["nats_url"]
    password = json.loads((run_dir / "credentials.json").read_text())["nats_passwords"]["scheduler"]
    bus = await nats.connect(url, user="scheduler", password=password, inbox_prefix=b"_INBOX_scheduler")
    await bus.subscribe(f"{EVT}.worker.reported.*", cb=on_reported)
    await asyncio.sleep(0.6)  # a round of heartbeats
    ME["epoch"] = 1 + max((worker["beat"]["epoch"] for worker in workers.values()), default=0)
    await bus.subscribe(f"{EVT}.worker.stepped.*", cb=on_stepped)
    await bus.subscribe(f"{CMD}.scheduler.submit", cb=on_submit)
    await bus.subscribe(f"{CMD}.scheduler.cancel", cb=on_cancel)
    while not any(worker["beat"]["epoch"] > ME["epoch"] for worker in workers.values()):  # replaced
        for name, worker in list(workers.items()):
            if time.monotonic() - worker["heard_s"] > 2:
                await lose(workers.pop(name), [])
            elif not worker["in_step"] or (worker["busy"] and time.monotonic() - worker["active_s"] > 10):
                await resync(name, worker)
        await bus.publish(f"{EVT}.scheduler.announced", packb(ME))
        await plan()
        await asyncio.sleep(0.25)


asyncio.run(main(Path(sys.argv[1])))
