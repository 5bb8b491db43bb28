"""The daemons as an operator starts them, over TCP, and as other people's programs see them: grpcio and what reflection tells, nothing of ours."""
import hashlib
import os
import queue
import random
import re
import signal
import socket
import struct
import subprocess
import threading
import time

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
import tally_testing
from tally_testing import Case, binary, make_job, mlp, synthetic, wait_for

STATES = ["JOB_UNKNOWN", "QUEUED", "STARTING", "RUNNING", "STOPPING", "SUCCEEDED", "FAILED", "STOPPED"]
ENDED = STATES[5:]


# ---- messages, as reflection describes them ----


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def field(number, value):
    """A length-delimited field on the wire."""
    return varint(number << 3 | 2) + varint(len(value)) + value


def fields(data):
    """{number: [bytes]} of the length-delimited fields."""
    found, at = {}, 0

    def number():
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        tag = number()
        if tag & 7 == 0:
            number()
        else:
            assert tag & 7 == 2, tag
            size = number()
            found.setdefault(tag >> 3, []).append(data[at : at + size])
            at += size
    return found


class Messages:
    """Classes by name ("tally.v1.Job"), made of what a server's reflection service answers."""

    def __init__(self, channel, *symbols):
        pool, files = descriptor_pool.DescriptorPool(), {}
        ask = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        replies = ask(iter([field(4, symbol.encode()) for symbol in symbols]), timeout=20)
        for reply in replies:
            for raw in fields(fields(reply)[4][0])[1]:
                f = descriptor_pb2.FileDescriptorProto.FromString(raw)
                files[f.name] = f

        def add(name):
            if name in files:
                f = files.pop(name)
                for needed in f.dependency:
                    add(needed)
                pool.Add(f)

        for name in list(files):
            add(name)
        self.pool, self.factory = pool, message_factory.MessageFactory(pool)

    def __getattr__(self, name):
        return self.factory.GetPrototype(self.pool.FindMessageTypeByName("tally.v1." + name))


# ---- the daemons ----


class Daemon:
    def __init__(self, test, *command):
        self.log = open(test.path(f"{len(os.listdir(test.dir))}.log"), "w+")
        env = {"ASAN_OPTIONS": "quarantine_size_mb=8", **os.environ}  # what was freed is not to count
        self.process = subprocess.Popen([*map(str, command)], stderr=self.log, env=env)
        test.addCleanup(self.kill)

    def text(self):
        with open(self.log.name) as f:
            return f.read()

    def wait_text(self, pattern, seconds=20):
        def look():
            assert self.process.poll() is None or re.search(pattern, self.text()), self.text()
            return re.search(pattern, self.text())

        return wait_for(look, seconds, f"{pattern} in\n{self.text()}")

    def stop(self, number=signal.SIGTERM, seconds=6):
        self.process.send_signal(number)
        code = self.process.wait(seconds)
        self.log.close()
        return code

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()


class Protocol(Case):
    LEASE_MS = 2000

    def setUp(self):
        super().setUp()
        self.coordinator = self.start_coordinator("127.0.0.1:0")
        self.address = self.coordinator.wait_text(r"listens on (\S+:\d+),")[1]
        self.channel = grpc.insecure_channel(self.address)
        self.addCleanup(self.channel.close)
        self.m = Messages(self.channel, "tally.v1.Jobs", "tally.v1.Cluster")

    def start_coordinator(self, listen):
        return Daemon(self, binary("server/tally-server"), "coordinator", "--listen", listen, "--state", self.path("state"), "--lease-ms", self.LEASE_MS)

    def start_shard(self, name):
        return Daemon(self, binary("server/tally-server"), "shard", "--name", name, "--listen", "127.0.0.1:0", "--coordinator", self.address)

    def start_worker(self, name):
        return Daemon(self, binary("worker/tally-worker"), "--name", name, "--listen", "127.0.0.1:0", "--coordinator", self.address)

    def start_nodes(self, workers=2, shards=1):
        nodes = [self.start_shard(f"s{i}") for i in range(shards)] + [self.start_worker(f"w{i}") for i in range(workers)]
        for node in nodes:
            node.wait_text("registered with the coordinator")
        return nodes

    def call(self, method, request, reply, **how):
        stub = self.channel.unary_unary("/tally.v1.Jobs/" + method, request_serializer=type(request).SerializeToString, response_deserializer=reply.FromString)
        for _ in range(20):
            try:
                return stub(request, timeout=20, wait_for_ready=True, **how)
            except grpc.RpcError as error:  # the connection to a coordinator that was restarted
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
            time.sleep(0.1)
        self.fail(f"{method}: the coordinator cannot be reached")

    def fails(self, code, text, method, request, reply):
        with self.assertRaises(grpc.RpcError) as caught:
            self.call(method, request, reply)
        self.assertEqual(caught.exception.code(), code, caught.exception.details())
        self.assertIn(text, caught.exception.details())

    def request(self, steps=30, workers=2, name="protocol", seed=1, request_id=None, samples=96):
        """The job of self.job(), as a client of another make would send it."""
        r = self.m.SubmitRequest(request_id=request_id or f"{random.getrandbits(64):x}")
        r.version.major = 1
        spec = r.spec
        spec.name, spec.seed = name, seed
        spec.model.layers.add().linear.out_features = 16
        spec.model.layers.add().relu.SetInParent()
        spec.model.layers.add().linear.out_features = 4
        spec.model.loss.cross_entropy.SetInParent()
        spec.data.train.synthetic.samples, spec.data.train.synthetic.classes = samples, 4
        spec.data.train.synthetic.shape.append(10)
        spec.train.batch_size, spec.train.micro_batch_size, spec.train.steps = 16, 4, steps
        spec.train.optimizer.sgd.lr, spec.train.optimizer.sgd.momentum = 0.05, 0.9
        spec.parallel.data.count = workers
        r.facts.input_shape.append(10)
        r.facts.train_samples = samples
        return r

    def job(self, steps=30):
        return make_job(mlp(16, 4), synthetic(96), batch_size=16, micro_batch_size=4, steps=steps, name="protocol")

    def submit(self, **how):
        return self.call("Submit", self.request(**how), self.m.Job)

    def get(self, job):
        return self.call("Get", self.m.JobRef(id=job), self.m.Job)

    def watch(self, job, after=0, timeout=60):
        stub = self.channel.unary_stream("/tally.v1.Jobs/Watch", request_serializer=self.m.WatchRequest.SerializeToString, response_deserializer=self.m.Events.FromString)
        return stub(self.m.WatchRequest(job=job, after=after), timeout=timeout)

    def events(self, job, after=0):
        return [event for batch in self.watch(job, after) for event in batch.events]

    def wait_state(self, job, *states, seconds=30):
        def look():
            state = STATES[self.get(job).state]
            return state if state in states or state in ENDED else None

        state = wait_for(look, seconds, f"job {job} to be {states}")
        self.assertIn(state, states, self.get(job).reason)
        return state

    def results(self, job, offset=0):
        stub = self.channel.unary_stream("/tally.v1.Jobs/Results", request_serializer=self.m.ResultsRequest.SerializeToString, response_deserializer=self.m.ResultChunk.FromString)
        return b"".join(chunk.data for chunk in stub(self.m.ResultsRequest(job=job, file="model.safetensors", offset=offset), timeout=20))

    def weights_sha256(self, job):
        raw = self.results(job)
        (header,) = struct.unpack("<Q", raw[:8])
        return hashlib.sha256(raw[8 + header :]).hexdigest()

    def join(self, *first, timeout=60):
        """A node's stream; send() and the replies' iterator. first: bytes or messages."""
        out = queue.Queue()
        for message in first:
            out.put(message)
        stub = self.channel.stream_stream("/tally.v1.Cluster/Join", request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(), response_deserializer=self.m.Order.FromString)
        call = stub(iter(out.get, None), timeout=timeout)
        self.addCleanup(out.put, None)
        self.addCleanup(call.cancel)
        return out.put, call

    def register(self, name="w7", role=1, **more):
        message = self.m.NodeMessage()
        r = message.register
        r.version.major = more.pop("major", 1)
        r.role, r.name, r.incarnation, r.address, r.pid, r.backend, r.isa = role, name, random.getrandbits(63), "127.0.0.1:9", 1, "cpu", "generic"
        for key, value in more.items():
            setattr(r, key, value)
        return message

    def ends(self, call, code, *words):
        with self.assertRaises(grpc.RpcError):
            for _ in call:
                pass
        self.assertEqual(call.code(), code, call.details())
        for word in words:
            self.assertIn(word, call.details())

    def healthy(self, address):
        with grpc.insecure_channel(address) as channel:
            self.assertEqual(channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10), b"\x08\x01")

    # ---- what an operator does ----

    def test_a_job_from_start_to_result(self):
        nodes = self.start_nodes(workers=2, shards=2)
        request = self.request()
        request.spec.parallel.shards = 2
        job = self.call("Submit", request, self.m.Job)
        self.assertEqual(self.call("Submit", request, self.m.Job).id, job.id)  # asked again: the same
        events = self.events(job.id)
        self.assertEqual([e.seq for e in events], list(range(1, len(events) + 1)))
        self.assertEqual([e.step.step for e in events if e.HasField("step")], list(range(1, 31)))
        self.assertEqual([e.seq for e in self.events(job.id, after=7)], list(range(8, len(events) + 1)))
        self.assertEqual(self.events(job.id, after=1 << 40), [])
        done = self.get(job.id)
        self.assertEqual((STATES[done.state], done.step, done.steps), ("SUCCEEDED", 30, 30), done.reason)
        self.assertEqual(done.spec.parallel.shards, 2)
        self.assertEqual(self.weights_sha256(job.id), done.weights_sha256)
        whole = self.results(job.id)
        self.assertEqual(self.results(job.id, offset=100), whole[100:])
        self.assertEqual(self.results(job.id, offset=len(whole)), b"")
        self.assertEqual(self.run_job(self.job()).sha256, done.weights_sha256)
        second = self.submit(name="second", steps=5)
        self.wait_state(second.id, "SUCCEEDED")
        listed = self.call("List", self.m.ListRequest(), self.m.ListReply).jobs
        self.assertEqual([(j.id, j.name, j.HasField("spec")) for j in listed], [(second.id, "second", False), (job.id, "protocol", False)])
        for node in [*nodes, self.coordinator]:
            self.assertEqual(node.stop(), 0, node)

    def test_stop(self):
        self.start_nodes()
        job = self.submit(steps=10_000_000).id
        self.wait_state(job, "RUNNING")
        wait_for(lambda: self.get(job).step > 10, 20, "steps")
        self.call("Stop", self.m.StopRequest(job=job, reason="enough"), self.m.Job)
        self.wait_state(job, "STOPPED")
        done = self.get(job)
        self.assertIn("enough", done.reason)
        self.assertEqual(self.weights_sha256(job), done.weights_sha256)
        self.assertEqual(len([e for e in self.events(job) if e.HasField("step")]), done.step)
        self.assertEqual(STATES[self.call("Stop", self.m.StopRequest(job=job), self.m.Job).state], "STOPPED")
        queued = self.submit(workers=5).id
        self.call("Stop", self.m.StopRequest(job=queued), self.m.Job)
        self.wait_state(queued, "STOPPED")

    def test_refusals_of_clients(self):
        invalid, state, none = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.NOT_FOUND
        request = self.request()
        request.version.major, request.version.minor = 9, 3
        self.fails(state, "9.3", "Submit", request, self.m.Job)
        self.fails(state, "1.0", "Submit", request, self.m.Job)
        for number, (change, text) in enumerate((
            (lambda r: r.ClearField("spec"), "spec"),
            (lambda r: r.ClearField("facts"), "facts"),
            (lambda r: setattr(r, "request_id", ""), "request_id"),
            (lambda r: setattr(r, "request_id", "x" * 65), "request_id"),
            (lambda r: r.spec.ClearField("model"), "model"),
            (lambda r: r.spec.model.ClearField("layers"), "layers"),
            (lambda r: r.spec.train.ClearField("optimizer"), "optimizer"),
            (lambda r: setattr(r.spec.train, "batch_size", 0), "batch_size"),
            (lambda r: setattr(r.spec.train.optimizer.sgd, "lr", float("nan")), "lr"),
            (lambda r: setattr(r.spec.model.layers[0].linear, "in_features", 11), "in_features"),
            (lambda r: r.facts.input_shape.extend([4294967295] * 60), ""),
            (lambda r: setattr(r.facts, "train_samples", 0), ""),
            (lambda r: setattr(r.spec, "name", "../../etc"), "name"),
            (lambda r: r.spec.model.layers[1].ClearField("relu"), "layers[1]"),
        )):
            request = self.request()
            change(request)
            with self.subTest(text, number=number):
                self.fails(invalid, text, "Submit", request, self.m.Job)
        self.fails(none, "no job 77", "Get", self.m.JobRef(id=77), self.m.Job)
        self.fails(none, "no job 77", "Stop", self.m.StopRequest(job=77), self.m.Job)
        self.ends(self.watch(77), none, "no job 77")
        job = self.submit().id
        for file, offset, code in (("model.safetensors", 0, state), ("../../jobs.sqlite", 0, none), ("", 0, none)):
            stub = self.channel.unary_stream("/tally.v1.Jobs/Results", request_serializer=self.m.ResultsRequest.SerializeToString)
            self.ends(stub(self.m.ResultsRequest(job=job, file=file, offset=offset), timeout=10), code)
        with self.assertRaises(grpc.RpcError) as caught:
            self.channel.unary_unary("/tally.v1.Jobs/Delete")(b"", timeout=10)
        self.assertEqual(caught.exception.code(), grpc.StatusCode.UNIMPLEMENTED)
        for raw in (b"\xff" * 30, b"\x0a\xff\xff\xff\xff\x0f", os.urandom(1000), b"\x1a\x00" * 100000):
            with self.assertRaises(grpc.RpcError) as caught:
                self.channel.unary_unary("/tally.v1.Jobs/Submit")(raw, timeout=10)
            self.assertIn(caught.exception.code(), (invalid, state, grpc.StatusCode.RESOURCE_EXHAUSTED))
        self.healthy(self.address)

    # ---- nodes of another make ----

    def test_refusals_of_nodes(self):
        state, invalid = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT
        m = self.m
        beat = m.NodeMessage()
        beat.heartbeat.seq = 1
        self.ends(self.join(self.register(major=2))[1], state, "2.0", "1.0")
        self.ends(self.join(beat)[1], invalid, "registered")
        self.ends(self.join(m.NodeMessage())[1], invalid, "registered")
        for change in ({"role": 0}, {"role": 9}, {"name": ""}, {"name": "a" * 65}, {"name": "a\nb"}, {"name": "../x"}, {"address": ""}, {"address": "x" * 5000}, {"isa": "sse"}):
            with self.subTest(change):
                _, call = self.join(self.register(**change))
                with self.assertRaises(grpc.RpcError):
                    for order in call:
                        self.fail(f"taken: {order}")
                self.assertIn(call.code(), (state, invalid), call.details())
        _, first = self.join(self.register("twin"))
        self.assertEqual(next(first).registered.lease_ms, self.LEASE_MS)
        _, second = self.join(self.register("twin", address="127.0.0.1:10"))
        with self.assertRaises(grpc.RpcError):
            next(second)
        self.assertIn("twin", second.details())
        _, again = self.join(self.register("twin"))  # the same address: it was restarted
        self.assertTrue(next(again).HasField("registered"))
        self.ends(first, state, "registered again")
        send, again = self.join(self.register("once"))
        next(again)
        send(self.register("once"))
        self.ends(again, invalid, "registers once")
        send, garbled = self.join(self.register("garbled"))
        next(garbled)
        send(b"\xff\xff\xff")
        self.ends(garbled, invalid)
        _, silent = self.join()
        began = time.monotonic()
        self.ends(silent, grpc.StatusCode.DEADLINE_EXCEEDED, "registered in time")
        self.assertLess(time.monotonic() - began, 5 * self.LEASE_MS / 1000)
        worker = self.start_worker("w0")
        worker.wait_text("registered with the coordinator")
        namesake = self.start_worker("w0")
        self.assertEqual(namesake.process.wait(20), 1)
        self.assertIn("w0", namesake.text().splitlines()[-1])
        self.healthy(self.address)

    def test_a_node_that_says_anything(self):
        """Random reports, of jobs that are and are not, in any order, do no harm to the job that trains."""
        self.start_nodes()
        job = self.submit(steps=3000)
        dice = random.Random(8)
        kinds = ["opened", "started", "steps", "evals", "finished", "job_failed", "ended", "heartbeat"]
        while STATES[self.get(job.id).state] not in ENDED:
            send, call = self.join(self.register(f"fake{dice.randrange(3)}", role=dice.choice([1, 2])))
            for _ in range(200):
                said = self.m.NodeMessage()
                part = getattr(said, dice.choice(kinds))
                part.SetInParent()
                for f in part.DESCRIPTOR.fields:
                    if f.name in ("job", "generation"):
                        setattr(part, f.name, dice.choice([0, 1, 2, 1 << 63]))
                    elif f.name == "step":
                        setattr(part, f.name, dice.choice([0, 1, 3000, (1 << 64) - 1]))
                    elif f.name == "records":
                        for _ in range(dice.randrange(4)):
                            part.records.add()
                send(said)
            send(None)
            try:
                for _ in call:
                    pass
            except grpc.RpcError:
                pass
        done = self.get(job.id)
        self.assertEqual(STATES[done.state], "SUCCEEDED", done.reason)
        self.assertEqual(self.run_job(self.job(3000)).sha256, done.weights_sha256)

    def test_a_gang_member_that_misbehaves(self):
        """A worker of another make that is assigned and then fails, leaves, falls silent or reports nonsense: the job ends with its name."""
        self.start_nodes(workers=1)
        m = self.m

        def said(kind, assign, **values):
            message = m.NodeMessage()
            part = getattr(message, kind)
            part.job, part.generation = assign.job, assign.generation
            for key, value in values.items():
                setattr(part, key, value)
            return message

        evals = lambda a: said("evals", a, step=99)
        for misbehave, word in (
            (lambda send, call, a: send(said("job_failed", a, reason="my disk is gone")), "my disk is gone"),
            (lambda send, call, a: send(None), "left"),
            (lambda send, call, a: call.cancel(), "lost"),
            (lambda send, call, a: None, "heartbeat"),
            (lambda send, call, a: send(said("finished", a, step=7)), "finished at step 7"),
            (lambda send, call, a: send(evals(a)), "evaluation"),
        ):
            with self.subTest(word):
                send, call = self.join(self.register("w9"))
                self.assertTrue(next(call).HasField("registered"))
                job = self.submit(steps=1000, workers=2).id
                order = next(call)
                self.assertTrue(order.HasField("assign"), order)
                self.assertEqual((order.assign.job, len(order.assign.shard_addresses)), (job, 1))
                misbehave(send, call, order.assign)
                self.wait_state(job, "FAILED")
                reason = self.get(job).reason
                self.assertIn("w9", reason)
                self.assertIn(word, reason)
                call.cancel()
        self.wait_state(self.submit(workers=1).id, "SUCCEEDED")

    # ---- faults of processes ----

    def test_coordinator_restarted_under_its_nodes(self):
        nodes = self.start_nodes()
        done = self.submit().id
        self.wait_state(done, "SUCCEEDED")
        running = self.submit(steps=10_000_000).id
        self.wait_state(running, "RUNNING")
        wait_for(lambda: self.get(running).step > 10, 20, "steps")
        second = self.start_coordinator("127.0.0.1:0")
        self.assertEqual(second.process.wait(20), 1)
        self.assertIn(self.path("state"), second.text())
        for number in (signal.SIGKILL, signal.SIGTERM):
            self.assertEqual(self.coordinator.stop(number), -9 if number == signal.SIGKILL else 0)
            self.coordinator = self.start_coordinator(self.address)
            self.coordinator.wait_text("listens on")
            self.wait_state(running, "FAILED")
            self.assertIn("restarted", self.get(running).reason)
            self.assertEqual(self.weights_sha256(done), self.get(done).weights_sha256)
            self.assertIn("FAILED", [STATES[e.state.state] for e in self.events(running) if e.HasField("state")])
            after = self.submit().id
            self.wait_state(after, "SUCCEEDED")
            self.assertEqual(self.get(after).weights_sha256, self.get(done).weights_sha256)
            running = self.submit(steps=10_000_000).id
            self.wait_state(running, "RUNNING")
            wait_for(lambda: self.get(running).step > 10, 20, "steps")
        for node in nodes:
            self.assertEqual(node.stop(), 0)
        self.wait_state(running, "FAILED")

    def test_shard_restarted(self):
        shard, *_ = self.start_nodes()
        job = self.submit(steps=10_000_000).id
        self.wait_state(job, "RUNNING")
        self.assertEqual(shard.stop(signal.SIGKILL), -9)
        self.wait_state(job, "FAILED")
        self.assertIn("s0", self.get(job).reason)
        self.start_shard("s0").wait_text("registered")
        self.wait_state(self.submit().id, "SUCCEEDED")

    # ---- load and noise ----

    def test_noise_on_every_port(self):
        """Random bytes, other protocols, connections that say nothing: the job that trains meanwhile has its bits, and all serve on."""
        nodes = self.start_nodes()
        addresses = [self.address] + [node.wait_text(r"serves at (\S+:\d+)")[1] for node in nodes]
        job = self.submit(steps=20000).id
        self.wait_state(job, "RUNNING")
        dice = random.Random(9)
        held = []
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        settings = b"\0\0\0\4\0\0\0\0\0"
        for i in range(300):
            host, port = addresses[i % len(addresses)].split(":")
            s = socket.create_connection((host, int(port)), timeout=10)
            noise = dice.randbytes(dice.randrange(2000))
            s.sendall(dice.choice([b"", noise, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", preface, preface + noise, preface + settings + noise,
                                   preface + settings + b"\xff\xff\xff\1\4\0\0\0\1", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"]))
            if dice.random() < 0.5:
                held.append(s)
            else:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", dice.randrange(2), 0))
                s.close()
        for address in addresses:
            self.healthy(address)
        self.wait_state(job, "SUCCEEDED", seconds=60)
        for s in held:
            s.close()
        self.assertEqual(self.run_job(self.job(20000)).sha256, self.get(job).weights_sha256)

    def test_many_pollers_and_a_slow_reader(self):
        self.start_nodes()
        job = self.submit(steps=10_000_000).id
        self.wait_state(job, "RUNNING")
        slow = [self.watch(job, timeout=300) for _ in range(8)]
        for call in slow:
            next(call)
        over, failed = threading.Event(), []

        def poll():
            channel = grpc.insecure_channel(self.address, options=[("grpc.use_local_subchannel_pool", 1)])
            stub = channel.unary_unary("/tally.v1.Jobs/Get")
            try:
                while not over.is_set():
                    stub(self.m.JobRef(id=job).SerializeToString(), timeout=20)
                    time.sleep(0.05)
            except grpc.RpcError as error:
                failed.append(error)
            channel.close()

        def resident():
            with open(f"/proc/{self.coordinator.process.pid}/status") as f:
                return int(re.search(r"VmRSS:\s+(\d+) kB", f.read())[1]) >> 10

        pollers = [threading.Thread(target=poll) for _ in range(100)]
        for thread in pollers:
            thread.start()
        time.sleep(3)
        first, memory = self.get(job).step, resident()
        time.sleep(3)
        steps, grown = self.get(job).step - first, resident() - memory
        over.set()
        for thread in pollers:
            thread.join()
        self.assertEqual(failed, [])
        self.assertGreater(steps, 100)
        self.assertLess(grown, 64)
        self.call("Stop", self.m.StopRequest(job=job), self.m.Job)
        self.wait_state(job, "STOPPED", seconds=60)
        # The slow one reads on and has missed nothing.
        seqs = [e.seq for batch in slow[0] for e in batch.events]
        self.assertEqual(seqs, list(range(seqs[0], seqs[-1] + 1)))
        self.assertGreaterEqual(seqs[-1], self.get(job).step)


if __name__ == "__main__":
    tally_testing.main()
