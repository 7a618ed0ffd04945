"""Eight CartPoles that a Coterie run acts on, without Coterie: docs/reference/wire.md in code.

Needs grpcio, protobuf and numpy.
"""

import argparse
import hmac
import itertools
import os
import queue
import random
import sys
import threading
from pathlib import Path

import grpc
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

ENVS, SILENCE_S = 8, 30.0
SENDS = {"reward": "float32", "terminated": "bool", "truncated": "bool", "is_first": "bool"}
SENDS |= {"episode_return": "float64", "episode_length": "float64", "obs/": "float32"}


class CartPoles:
    """Eight of Gymnasium's CartPole-v1. `seen` holds the tensors of a data frame."""

    def __init__(self):
        self.length, self.state, self.ended = np.zeros(ENVS), np.zeros((ENVS, 4)), np.ones(ENVS, bool)
        self.step(np.zeros(ENVS, np.int64))

    def step(self, action):
        _, speed, angle, spin = self.state.T
        push = (np.where(action == 1, 10.0, -10.0) + 0.05 * spin**2 * np.sin(angle)) / 1.1
        turn = (9.8 * np.sin(angle) - np.cos(angle) * push) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
        after = self.state + 0.02 * np.stack([speed, push - 0.05 * turn * np.cos(angle) / 1.1, spin, turn], 1)
        first = self.ended  # a reset step: the action is ignored, and the reward is 0
        self.state = np.where(first[:, None], np.random.uniform(-0.05, 0.05, (ENVS, 4)), after)
        self.length = np.where(first, 0, self.length + 1)
        fell = ~first & ((abs(self.state[:, 0]) > 2.4) | (abs(self.state[:, 2]) > np.radians(12)))
        late = ~first & ~fell & (self.length == 500)
        self.ended = fell | late
        told = np.where(self.ended, self.length, np.nan)  # each step earns 1: the return is the length
        self.seen = {"reward": ~first, "terminated": fell, "truncated": late, "is_first": first, "obs/": self.state}
        self.seen |= {"episode_return": told, "episode_length": told}


class RunEnded(Exception):
    """The run has ended."""


def connect(address, desc, cert, token, **hello):
    """Open a stream; returns the welcome, and a function that sends a frame and waits for the answer."""
    pool, outbox = descriptor_pool.DescriptorPool(), queue.SimpleQueue()
    pool.AddSerializedFile(descriptor_pb2.FileDescriptorSet.FromString(desc.read_bytes()).file[0].SerializeToString())
    frame_type = message_factory.GetMessageClass(pool.FindMessageTypeByName("coterie.v1.Frame"))
    tls = cert and grpc.ssl_channel_credentials(cert.read_bytes())
    channel = grpc.secure_channel(address, tls) if tls else grpc.insecure_channel(address)
    method = channel.stream_stream("/coterie.v1.Coterie/Infer", frame_type.SerializeToString, frame_type.FromString)
    call = method(iter(outbox.get, None))

    def ask(**kind):
        outbox.put(frame_type(**kind))
        while True:
            (watch := threading.Timer(SILENCE_S, call.cancel)).start()
            try:
                frame = next(call)
            finally:
                watch.cancel()
            if frame.HasField("over"):
                raise RunEnded(frame.over.reason)
            if frame.WhichOneof("kind"):  # a frame of no kind is a heartbeat
                return frame

    hello |= {"protocol": 2, "env_id": "CartPole-v1", "number": -1, "nonce": os.urandom(32) if token else b""}
    frame = ask(hello=hello)
    if token:  # it is never sent: both ends prove that they know it, the server first
        nonces, secret = hello["nonce"] + frame.challenge.nonce, token.read_bytes().strip()
        if not hmac.compare_digest(frame.challenge.proof, hmac.digest(secret, b"server" + nonces, "sha256")):
            sys.exit("the server does not know the token")
        frame = ask(proof=hmac.digest(secret, b"client" + nonces, "sha256"))
    return frame.welcome, ask


def main(address, **secrets):
    steps, envs, me = 0, CartPoles(), {"client": "wire_client.py", "run_id": random.getrandbits(64)}
    try:
        welcome, _ = connect(address, **secrets, **me, envs=0)  # learner 0 assigns a learner
        if learner := welcome.number % welcome.learners:
            host, _, port = address.rpartition(":")
            address = f"{address}.{learner}" if host == "unix" else f"{host}:{int(port) + learner}"
        sends = [{"name": name, "dtype": x, "shape": envs.seen[name].shape} for name, x in SENDS.items()]
        _, ask = connect(address, **secrets, **me, envs=ENVS, sends=sends)
        for number in itertools.count():
            tensors = b"".join(np.asarray(envs.seen[name], x).tobytes() for name, x in SENDS.items())
            envs.step(np.frombuffer(ask(data={"number": number, "tensors": tensors}).data.tensors, np.int64))
            steps += int((~envs.seen["is_first"]).sum())
    except RunEnded as reason:
        print(f"{steps} steps; over: {reason}")
    except grpc.RpcError as error:
        sys.exit(f"{error.code().name}: {error.details()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Eight CartPoles that a Coterie run acts on.")
    parser.add_argument("address", help="HOST:PORT or unix:PATH of learner 0")
    parser.add_argument("--desc", type=Path, default=Path(__file__).parents[1] / "coterie/wire/coterie.desc")
    parser.add_argument("--cert", type=Path, help="the run's certificate (PEM), where it has TLS")
    parser.add_argument("--token", type=Path, help="envs.token of the run's keys, where it needs one")
    main(**vars(parser.parse_args()))
