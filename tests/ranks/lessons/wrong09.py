"""Wrong solutions of the tasks on RPC: the task, what must be said of it, and the function or class."""

from __future__ import annotations

import threading

import torch
import torch.distributed.rpc as rpc
from wrong import wrong


class ServerBase:
    def __init__(self, w, rule):
        self.w, self.first, self.rule, self.lock = w, w, rule, threading.Lock()

    def pull(self):
        with self.lock:
            return self.w.clone()


@wrong("09.1", "lost: calls run in threads, and ")
class NoLock(ServerBase):
    def push(self, grad):
        self.w = self.rule(self.w, grad)
        return self.w


@wrong("09.1", "1 of them reach the rule: one that finds another at work is dropped")
class DropsWhenBusy(ServerBase):
    def push(self, grad):
        if self.lock.acquire(blocking=False):
            self.w = self.rule(self.w, grad)
            self.lock.release()
        return self.w


@wrong("09.1", "each update begins at the first ones")
class BeginsAtTheFirst(ServerBase):
    def push(self, grad):
        with self.lock:
            self.w = self.rule(self.first, grad)
            return self.w


@wrong("09.1", "pull() gives the weights as they were before all updates")
class PullsTheFirst(ServerBase):
    def push(self, grad):
        with self.lock:
            self.w = self.rule(self.w, grad)
            return self.w

    def pull(self):
        return self.first


@wrong("09.1", ": these are not the weights after its own update")
class AnswersBefore(ServerBase):
    def push(self, grad):
        with self.lock:
            before = self.w
            self.w = self.rule(before, grad)
            return before


@wrong("09.2", "worker1 must answer before the next is asked: that is one after the other")
def one_by_one(names, function, args):
    return [rpc.rpc_sync(name, function, args=args) for name in names]


@wrong("09.2", "that is one after the other")
def waits_in_the_loop(names, function, args):
    return [rpc.rpc_async(name, function, args=args).wait() for name in names]


@wrong("09.2", "you give futures, and not what they will hold: nobody has waited for them")
def futures(names, function, args):
    return [rpc.rpc_async(name, function, args=args) for name in names]


@wrong("09.2", "by who was first, not by name")
def as_they_come(names, function, args):
    came = []
    asked = [rpc.rpc_async(name, function, args=args).then(lambda done: came.append(done.value())) for name in names]
    torch.futures.wait_all(asked)
    return came


@wrong("09.2", "raises ValueError, and who has asked does not learn of it")
def keeps_quiet(names, function, args):
    answers = []
    for future in [rpc.rpc_async(name, function, args=args) for name in names]:
        try:
            answers.append(future.wait())
        except Exception:
            answers.append(None)
    return answers


@wrong("09.2", " is asked more than once")
def asks_twice(names, function, args):
    for name in names:
        rpc.rpc_async(name, function, args=args)
    return torch.futures.wait_all([rpc.rpc_async(name, function, args=args) for name in names])
