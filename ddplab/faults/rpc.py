"""Workers that call each other, and calls that do not arrive."""

import os
import pickle
import time

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.nn as nn
from torch.distributed.optim import DistributedOptimizer

from ddplab.faults.fault import fault

CATEGORY = "rpc"


@fault(
    CATEGORY,
    did="there is a process group, but init_rpc was not called",
    sees="RuntimeError: RPC has not been initialized. Call torch.distributed.rpc.init_rpc first.",
    root=None,
    cause="rpc-no-init",
)
def rpc_no_init():
    return rpc.rpc_sync(f"worker{1 - dist.get_rank()}", torch.add, args=(1, 2))


@rpc_no_init.cured_by("call init_rpc on each worker: a process group is another thing, and RPC needs none")
def rpc_no_init_repaired():
    rank = dist.get_rank()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(1, 2))
    rpc.shutdown()
    return answer


@fault(
    CATEGORY,
    did="dist.rpc_async is called, which torch does not have",
    sees="AttributeError: module 'torch.distributed' has no attribute 'rpc_async'",
    root=None,
    cause="rpc-not-imported",
    backend=None,
)
def rpc_in_dist():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer = dist.rpc_async(f"worker{1 - rank}", torch.add, args=(1, 2)).wait()
    rpc.shutdown()
    return answer


@rpc_in_dist.cured_by("torch.distributed.rpc has rpc_sync, rpc_async and remote")
def rpc_in_dist_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer = rpc.rpc_async(f"worker{1 - rank}", torch.add, args=(1, 2)).wait()
    rpc.shutdown()
    return answer


@fault(
    CATEGORY,
    did="init_rpc is called twice",
    sees="RuntimeError: RPC is already initialized",
    root=None,
    cause="rpc-init-twice",
    backend=None,
    world_size=1,
)
def rpc_init_twice():
    for _ in range(2):
        rpc.init_rpc("worker0", rank=0, world_size=1)


@rpc_init_twice.cured_by("once in each process: a notebook's cell that runs again needs fresh processes")
def rpc_init_twice_repaired():
    rpc.init_rpc("worker0", rank=0, world_size=1)
    rpc.shutdown()


@fault(
    CATEGORY,
    did="both workers have the same name",
    sees="RuntimeError: RPC worker name worker is not unique. Workers … share the same name.",
    root=None,
    cause="rpc-worker-name",
    backend=None,
)
def rpc_same_name():
    rpc.init_rpc("worker", rank=int(os.environ["RANK"]), world_size=2)
    rpc.shutdown()


@rpc_same_name.cured_by("put the rank into the name")
def rpc_same_name_repaired():
    rpc.init_rpc(f"worker{os.environ['RANK']}", rank=int(os.environ["RANK"]), world_size=2)
    rpc.shutdown()


@fault(
    CATEGORY,
    did="init_rpc is told of one worker more than there are, and waits for it",
    sees="hangs in init_rpc",
    root=None,
    cause="rpc-workers-missing",
    backend=None,
    timeout_s=1.5,
)
def rpc_world_size():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    rpc.shutdown()


@rpc_world_size.cured_by("take the number from the launcher: WORLD_SIZE")
def rpc_world_size_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    rpc.shutdown()


@fault(
    CATEGORY,
    did="worker0 calls a worker by a name that none has",
    sees={
        0: "RuntimeError: name:worker0,rank:0 could not find destination name worker_1",
        1: "echo or RuntimeError: eof",
    },
    cause="rpc-unknown-worker",
    backend=None,
)
def rpc_unknown_worker():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer = rpc.rpc_sync("worker_1", torch.add, args=(1, 2)) if rank == 0 else None
    rpc.shutdown()
    return answer


@rpc_unknown_worker.cured_by("use the name that the worker gave to init_rpc")
def rpc_unknown_worker_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer = rpc.rpc_sync("worker1", torch.add, args=(1, 2)) if rank == 0 else None
    rpc.shutdown()
    return answer


@fault(
    CATEGORY,
    did="what worker0 calls on worker1 raises there: worker0 gets the exception, with the text from worker1",
    sees={0: "RuntimeError: ZeroDivisionError: On WorkerInfo(id=1, name=worker1):", 1: "echo or RuntimeError: eof"},
    cause="rpc-remote-exception",
    backend=None,
)
def rpc_remote_exception():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer = rpc.rpc_sync("worker1", divmod, args=(1, 0)) if rank == 0 else None
    rpc.shutdown()
    return answer


@rpc_remote_exception.cured_by("mend the function or its arguments; called on the spot, it fails in the same way")
def rpc_remote_exception_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer = rpc.rpc_sync("worker1", divmod, args=(1, 2)) if rank == 0 else None
    rpc.shutdown()
    return answer


@fault(
    CATEGORY,
    did="worker0 waits a tenth of a second for a call that takes longer",
    sees={0: "RuntimeError: RPCErr:1:RPC ran for more than set timeout (100 ms)", 1: "echo or RuntimeError: eof"},
    cause="rpc-timeout",
    backend=None,
)
def rpc_timeout():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        rpc.rpc_sync("worker1", time.sleep, args=(0.5,), timeout=0.1)
    rpc.shutdown()


@rpc_timeout.cured_by("a time-out longer than the call, or rpc_async, and the wait where the answer is needed")
def rpc_timeout_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        rpc.rpc_sync("worker1", time.sleep, args=(0.5,), timeout=30)
    rpc.shutdown()


@fault(
    CATEGORY,
    did="worker0 sends a function within a function, which worker1 cannot find by its name",
    sees={
        0: "AttributeError: Can't pickle local object or PicklingError: Can't pickle local object",
        1: "echo or RuntimeError: eof",
    },
    cause="rpc-unpicklable",
    backend=None,
)
def rpc_unpicklable():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer = rpc.rpc_sync("worker1", lambda a, b: a + b, args=(1, 2)) if rank == 0 else None
    rpc.shutdown()
    return answer


@rpc_unpicklable.cured_by("send functions of a module, which all workers have")
def rpc_unpicklable_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer = rpc.rpc_sync("worker1", torch.add, args=(1, 2)) if rank == 0 else None
    rpc.shutdown()
    return answer


@fault(
    "launcher_notebook",
    did="the process of worker1 ends while it serves worker0",
    sees={0: "echo or RuntimeError: eof", 1: "exit code 3"},
    root=None,  # worker1 ends first; which of the two is told first is chance
    cause="silent-exit",
    backend=None,
)
def rpc_peer_killed():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        rpc.rpc_sync("worker1", os._exit, args=(3,))
    rpc.shutdown()


@rpc_peer_killed.cured_by("look at the end of the called process: its caller knows only that the connection ended")
def rpc_peer_killed_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        rpc.rpc_sync("worker1", os.getpid)
    rpc.shutdown()


@fault(
    CATEGORY,
    did="worker1 has no calls to make and leaves without shutdown, while it serves worker0",
    sees={0: "RuntimeError: eof (this error originated at tensorpipe", 1: "returns None"},
    cause="rpc-peer-gone",
    backend=None,
)
def rpc_no_shutdown():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        rpc.rpc_sync("worker1", time.sleep, args=(1,))
        rpc.shutdown()


@rpc_no_shutdown.cured_by("every worker ends with shutdown, which serves until all have come to it")
def rpc_no_shutdown_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        rpc.rpc_sync("worker1", time.sleep, args=(1,))
    rpc.shutdown()


@fault(
    CATEGORY,
    did="worker1 shuts down without waiting for the others, while it serves worker0",
    sees={0: "RuntimeError: eof (this error originated at tensorpipe", 1: "returns None or echo"},
    cause="rpc-peer-gone",
    backend=None,
)
def rpc_shutdown_early():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        rpc.rpc_sync("worker1", time.sleep, args=(0.5,))
    rpc.shutdown(graceful=rank == 0)


@rpc_shutdown_early.cured_by("rpc.shutdown() alone waits until all workers are done with all calls")
def rpc_shutdown_early_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        rpc.rpc_sync("worker1", time.sleep, args=(0.5,))
    rpc.shutdown()


@fault(
    CATEGORY,
    did="worker1 never comes to shutdown, and worker0 waits there for it",
    sees={0: "hangs in shutdown", 1: "hangs"},
    root=None,
    cause="rpc-shutdown",
    backend=None,
    timeout_s=1.5,
)
def rpc_shutdown_waits():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    while rank == 1:
        time.sleep(0.1)  # it serves for good
    rpc.shutdown()


@rpc_shutdown_waits.cured_by("call shutdown on all workers, also on those that only serve: it serves while it waits")
def rpc_shutdown_waits_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    rpc.shutdown()


@fault(
    CATEGORY,
    did="worker0 asks for the local value of an object that worker1 owns",
    sees={
        0: "RuntimeError: For UserRRef(…), can't call localValue() on user WorkerInfo(id=0, name=worker0).",
        1: "echo or RuntimeError: eof",
    },
    cause="rpc-local-value",
    backend=None,
)
def rpc_local_value():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer = rpc.remote("worker1", torch.add, args=(1, 2)).local_value() if rank == 0 else None
    rpc.shutdown()
    return answer


@rpc_local_value.cured_by("to_here() fetches a copy from the owner")
def rpc_local_value_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer = rpc.remote("worker1", torch.add, args=(1, 2)).to_here() if rank == 0 else None
    rpc.shutdown()
    return answer


@fault(
    CATEGORY,
    did="worker0 calculates with a reference as if it were the tensor, which is on worker1",
    sees={
        0: "TypeError: unsupported operand type(s) for +: 'torch._C._distributed_rpc.PyRRef' and 'int'",
        1: "echo or RuntimeError: eof",
    },
    cause="rpc-not-fetched",
    backend=None,
)
def rpc_not_fetched():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer = rpc.remote("worker1", torch.add, args=(1, 2)) + 1 if rank == 0 else None
    rpc.shutdown()
    return answer


@rpc_not_fetched.cured_by("to_here() first: a reference only tells where the value is")
def rpc_not_fetched_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    answer = rpc.remote("worker1", torch.add, args=(1, 2)).to_here() + 1 if rank == 0 else None
    rpc.shutdown()
    return answer


@fault(
    CATEGORY,
    did="a reference is pickled by hand, as for a file or a queue",
    sees={
        0: "RuntimeError: Can not pickle rref in python pickler, rref can only be pickled when using RPC",
        1: "echo or RuntimeError: eof",
    },
    cause="rpc-rref-pickle",
    backend=None,
)
def rpc_pickle_rref():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        pickle.dumps(rpc.remote("worker1", torch.add, args=(1, 2)))
    rpc.shutdown()


@rpc_pickle_rref.cured_by("send a reference as an argument of a call, or pickle the value: to_here()")
def rpc_pickle_rref_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        pickle.dumps(rpc.remote("worker1", torch.add, args=(1, 2)).to_here())
    rpc.shutdown()


@fault(
    CATEGORY,
    did="worker0 sends its optimizer to worker1, which steps there: a copy of the parameters moves",
    sees={0: "returns [1.0, 1.0]", 1: "returns None"},
    right=([0.5, 0.5], None),
    cause="rpc-copied-optimizer",
    backend=None,
)
def rpc_optimizer():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    w = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.5)
    if rank == 0:
        w.sum().backward()
        rpc.rpc_sync("worker1", optimizer.step)
    rpc.shutdown()
    return w.tolist() if rank == 0 else None


@rpc_optimizer.cured_by("step where the parameters are; a DistributedOptimizer steps on each owner")
def rpc_optimizer_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    w = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.5)
    if rank == 0:
        w.sum().backward()
        optimizer.step()
    rpc.shutdown()
    return w.tolist() if rank == 0 else None


@fault(
    CATEGORY,
    did="backward() of autograd, outside of a context: it ends where the tensor came in by RPC, and w gets no gradient",
    sees="returns None",
    right=([3.0, 3.0], None),
    cause="rpc-backward",
    backend=None,
)
def rpc_backward():
    rank, grad = int(os.environ["RANK"]), None
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        w, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        loss = (rpc.rpc_sync("worker1", torch.mul, args=(w, 3)) * x).sum()
        loss.backward()
        grad = w.grad.tolist() if w.grad is not None else None
    rpc.shutdown()
    return grad


@rpc_backward.cured_by("forward and dist_autograd.backward in one context, which keeps the gradients")
def rpc_backward_repaired():
    rank, grad = int(os.environ["RANK"]), None
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        w, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        with dist_autograd.context() as context_id:
            loss = (rpc.rpc_sync("worker1", torch.mul, args=(w, 3)) * x).sum()
            dist_autograd.backward(context_id, [loss])
            grad = dist_autograd.get_gradients(context_id)[w].tolist()
    rpc.shutdown()
    return grad


@fault(
    CATEGORY,
    did="the optimizer steps after the end of the context, which had the gradients",
    sees={0: "RuntimeError: Could not find autograd context with id: ", 1: "echo or RuntimeError: eof"},
    cause="rpc-autograd-context",
    backend=None,
)
def rpc_autograd_context():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        w = torch.ones(2, requires_grad=True)
        optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(w)], lr=0.5)
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.sum, args=(w,))])
        optimizer.step(context_id)
        del optimizer
    rpc.shutdown()


@rpc_autograd_context.cured_by("step within the context")
def rpc_autograd_context_repaired():
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:
        w = torch.ones(2, requires_grad=True)
        optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(w)], lr=0.5)
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.sum, args=(w,))])
            optimizer.step(context_id)
        del optimizer
    rpc.shutdown()


@fault(
    CATEGORY,
    did="a device map names GPUs that the machine does not have",
    sees="ValueError: Node worker… has source devices with invalid indices in its device map for worker…",
    root=None,
    cause="rpc-device-map",
    backend=None,
    env={"CUDA_VISIBLE_DEVICES": ""},
)
def rpc_device_map():
    rank = int(os.environ["RANK"])
    options = rpc.TensorPipeRpcBackendOptions()
    options.set_device_map(f"worker{1 - rank}", {0: 0})
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    rpc.shutdown()


@rpc_device_map.cured_by("name only devices that are there, and none where tensors travel from CPU to CPU")
def rpc_device_map_repaired():
    rank = int(os.environ["RANK"])
    options = rpc.TensorPipeRpcBackendOptions()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    rpc.shutdown()
