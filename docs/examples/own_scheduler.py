"""A scheduler of one's own: first come, first served, room for whole answers. See docs/own-scheduler.md."""

import asyncio
import json
import sys
import time
from pathlib import Path

import nats
from msgpack import packb, unpackb

CMD, EVT, STEPS, MOST = "kvasir.v1.cmd", "kvasir.v1.evt", 8, 16
EPOCH = time.time_ns() // 1_000_000  # above that of every scheduler before
ME = {"scheduler_id": "own-0", "incarnation": EPOCH, "epoch": EPOCH, "policy": "own"}
jobs, workers = {}, {}  # attempt of a sequence → job, oldest first; worker id → what it said when it joined


def key(ref):
    return ref["request_id"], ref["choice"], ref["attempt"]


def at(name):
    return [job for job in jobs.values() if job["worker"] == name]


def blocks(job, name):
    return -(-job["limit"] // workers[name]["block_tokens"])


def free(name):
    return workers[name]["capacity"]["total_blocks"] - sum(blocks(job, name) for job in at(name))


async def on_submit(msg):
    spec = unpackb(msg.data)["spec"]
    prompt, done = len(spec["prompt"]) // 4, len(spec.get("generated", b"")) // 4
    limit = prompt + spec["sampling"]["max_tokens"]
    new = {"ref": spec["ref"], "worker": None, "spec": spec, "chunk": (0, prompt + done), "limit": limit}
    known = jobs.setdefault(key(spec["ref"]), new) is not new
    await bus.publish(msg.reply, packb({**ME, "known": known}))
    await plan()


async def on_reported(msg):  # a heartbeat
    beat, now_s = unpackb(msg.data), time.monotonic()
    worker = workers.get(beat["worker_id"], {"incarnation": None})
    if worker["incarnation"] != beat["incarnation"] or (worker["busy"] and now_s - worker["active_s"] > 5):
        await join(beat["worker_id"])
    workers[beat["worker_id"]]["heard_s"] = now_s
    for silent in [name for name, worker in workers.items() if now_s - worker["heard_s"] > 2]:
        del workers[silent]
        for job in at(silent):  # gateways hear nothing either, and submit it again
            del jobs[key(job["ref"])]
    await bus.publish(f"{EVT}.scheduler.announced", packb(ME))
    await plan()


async def join(name):  # the one way into step: the worker gives up all plans and says what it holds
    workers.pop(name, None)
    reply = await bus.request(f"{CMD}.worker.snapshot.{name}", packb({"epoch": EPOCH}), timeout=2)
    workers[name] = found = {**unpackb(reply.data), "seq": 0, "busy": False, "heard_s": time.monotonic()}
    for held in found.get("sequences", []):
        prompt, done = held["prompt_tokens"], held["generated_tokens"]
        limit = prompt + held["max_tokens"]
        chunk = None if held["state"] == "decoding" else (held["computed_tokens"], prompt + done)
        jobs[key(held["ref"])] = {"ref": held["ref"], "worker": name, "chunk": chunk, "limit": limit}


async def on_stepped(msg):
    step = unpackb(msg.data)
    worker, skips = workers.get(step["worker_id"]), step.get("skipped", [])
    if worker is None or step["seq"] <= worker["stepped_seq"]:
        return
    is_gap = step["seq"] > worker["stepped_seq"] + 1
    for over in [*step.get("ended", []), *skips]:
        jobs.pop(key(over["ref"]), None)
    worker.update(stepped_seq=step["seq"], busy=not step["plan_over"], active_s=time.monotonic())
    if "outcome" in step or is_gap or any(skip["reason"] != "unknown" for skip in skips):
        del workers[step["worker_id"]]  # not as planned: its next heartbeat brings it back into step
    await plan()


async def plan():
    for job in at(None):
        best = max(workers, key=free, default=None)
        if best is None or blocks(job, best) > free(best) or len(at(best)) >= MOST:
            break
        job["worker"] = best
    for name, worker in list(workers.items()):
        if at(name) and not worker["busy"]:
            worker.update(seq=worker["seq"] + 1, busy=True, active_s=time.monotonic())
            await bus.publish(f"{CMD}.worker.plan.{name}", packb(next_plan(name, worker["seq"])))


def next_plan(name, seq):
    items = [({"ref": job["ref"], "allocated_blocks": blocks(job, name)}, job) for job in at(name)]
    chunks = [(item, job.pop("chunk")) for item, job in items if job.get("chunk")]
    prefills = [{**item, "first_token": first, "end_token": end} for item, (first, end) in chunks]
    starts = [job.pop("spec") for job in at(name) if "spec" in job]
    work = {"starts": starts, "prefills": prefills, "decodes": [item for item, _ in items]}
    return {"epoch": EPOCH, "seq": seq, "steps": STEPS, **work}


async def main(run_dir):
    global bus
    url = json.loads((run_dir / "state.json").read_text())["nats_url"]
    password = json.loads((run_dir / "credentials.json").read_text())["nats_passwords"]["scheduler"]
    bus = await nats.connect(url, user="scheduler", password=password, inbox_prefix=b"_INBOX_scheduler")
    await bus.subscribe(f"{EVT}.worker.stepped.*", cb=on_stepped)
    await bus.subscribe(f"{EVT}.worker.reported.*", cb=on_reported)
    await asyncio.sleep(0.6)  # a round of heartbeats
    await bus.subscribe(f"{CMD}.scheduler.submit", cb=on_submit)
    while not bus.is_closed:
        await asyncio.sleep(1)


asyncio.run(main(Path(sys.argv[1])))
