"""A scheduler of one's own: first come, first served, room for whole answers. See docs/own-scheduler.md."""

import asyncio
import json
import sys
import time
from pathlib import Path

import nats
from msgspec.msgpack import decode, encode

CMD, EVT = "kvasir.v1.cmd", "kvasir.v1.evt"
EPOCH = time.time_ns() // 1_000_000  # above that of every scheduler before
ME = {"scheduler_id": "own-0", "incarnation": EPOCH, "epoch": EPOCH, "policy": "own"}
bus, queue = nats.NATS(), []
tasks, at = {}, {}  # worker id → what keeps it busy; worker id → attempts that are there


async def on_submit(msg):
    spec = decode(msg.data)["spec"]
    known = spec["ref"] in sum(at.values(), [waiting["ref"] for waiting in queue])
    if not known:
        queue.append(spec)
    await msg.respond(encode({**ME, "known": known}))


async def on_reported(msg):  # a heartbeat
    name = decode(msg.data)["worker_id"]
    if name not in tasks:
        tasks[name] = asyncio.create_task(keep_busy(name))
    await bus.publish(f"{EVT}.scheduler.announced", encode(ME))


async def keep_busy(name):
    at[name], stepped = [], await bus.subscribe(f"{EVT}.worker.stepped.{name}")
    try:
        while True:
            await next_round(name, stepped)
            while not (queue or at[name]):
                await asyncio.sleep(0.005)
    except nats.errors.Error as error:
        print(f"{name}: {error}; its next heartbeat begins anew")
    finally:
        del tasks[name], at[name]
        await stepped.unsubscribe()


async def next_round(name, stepped):  # ask what it holds, say what comes next, wait until that is done
    reply = await bus.request(f"{CMD}.worker.snapshot.{name}", encode({"epoch": EPOCH}), timeout=2)
    worker = decode(reply.data)
    held = [as_item(job, worker) for job in worker.get("sequences", []) if job["state"] != "ended"]
    free = worker["capacity"]["total_blocks"] - sum(item["allocated_blocks"] for item in held)
    starts = [spec for spec in queue[:1] if needed_blocks(spec, worker) <= free]  # computed next round
    del queue[: len(starts)]
    at[name] = [item["ref"] for item in starts + held]
    prefills = [item for item in held if item["state"] != "decoding"]
    plan = {"steps": 1 if starts else 8, "starts": starts, "prefills": prefills, "decodes": held}
    await bus.publish(f"{CMD}.worker.plan.{name}", encode({"epoch": EPOCH, "seq": 1, **plan}))
    is_over = False
    while not is_over:
        step = decode((await stepped.next_msg(timeout=2)).data)
        is_over = step["seq"] > worker["stepped_seq"] and step["plan_over"]


def needed_blocks(spec, worker):
    return -(-(len(spec["prompt"]) // 4 + spec["sampling"]["max_tokens"]) // worker["block_tokens"])


def as_item(job, worker):  # what a snapshot says, and what the items of a plan say besides
    limit, end = job["prompt_tokens"] + job["max_tokens"], job["prompt_tokens"] + job["generated_tokens"]
    blocks = -(-limit // worker["block_tokens"])
    return {**job, "allocated_blocks": blocks, "first_token": job["computed_tokens"], "end_token": end}


async def main(run_dir):
    url = json.loads((run_dir / "state.json").read_text())["nats_url"]
    password = json.loads((run_dir / "credentials.json").read_text())["nats_passwords"]["scheduler-0"]
    await bus.connect(url, user="scheduler-0", password=password, inbox_prefix=b"_INBOX_scheduler-0")
    await bus.subscribe(f"{EVT}.worker.reported.*", cb=on_reported)
    await asyncio.sleep(0.6)  # a round of heartbeats
    await bus.subscribe(f"{CMD}.scheduler.submit.*", cb=on_submit)
    while not bus.is_closed:
        await asyncio.sleep(1)


asyncio.run(main(Path(sys.argv[1])))
