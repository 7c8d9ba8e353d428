"""A device that every machine has: its tensors report the device "meta" and compute on the CPU.

A GPU pays for two things that a CPU hides. A *launch* is an operation that computes or copies; views are free. A *wait* is a value that
Python needs before it can go on: a number, or a size that depends on values. `PretendDevice` counts both, and *uploads*, the tensors that
are copied to the device. It raises where a GPU would: tensors of two devices in one operation, `numpy()`.

    with PretendDevice() as device:
        encoder(device.upload(x), device.upload(mask))
    device.launches, device.waits, device.uploads
"""
from functools import cache

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CPU, META = torch.device("cpu"), torch.device("meta")
FREE = {"_unsafe_view", "lift_fresh", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}   # besides views
SIZED_BY_VALUES = torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output
TAKES_HOST_INDICES = {"index", "index_put", "index_put_", "_index_put_impl_"}
MAY_CROSS = {"copy_", "_to_copy"}


class DeviceTensor(torch.Tensor):
    "A tensor that reports the pretend device; `held` has its values."
    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
                                                   dtype=held.dtype, device=META)
        made.held = held
        return made

    def __repr__(self, *, tensor_contents=None):
        return f"DeviceTensor({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} of a pretend device that has been left")


def is_free(func):
    "Whether an operation gives a view, or memory without values."
    aliases = [one.alias_info for one in func._schema.returns]
    return func._schema.name.split("::")[1] in FREE or bool(aliases) and all(one and not one.is_write for one in aliases)


@cache
def traits(func):
    "Name of an operation; whether it is free, needs a size or number from values, place and name of the written argument."
    schema = func._schema
    written = [(place, one.name) for place, one in enumerate(schema.arguments) if one.alias_info and one.alias_info.is_write]
    assert len(written) <= 1, f"{func} is not known to the pretend device"
    return schema.name.split("::")[1], is_free(func), any(tag in func.tags for tag in SIZED_BY_VALUES), written


def asks_for_size(args):
    "Whether an index operation counts the true values of a mask; filling one with a number of the CPU does not."
    masks = [one for one in args[1] if isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8)]
    fills = len(args) > 2 and len(args[1]) == 1 and args[2].numel() == 1 and not isinstance(args[2], DeviceTensor)
    return bool(masks) and not fills


def hold(value, tensors):
    "The argument of an operation with values for tensors of the device; appends all tensors."
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return value.held if isinstance(value, DeviceTensor) else value
    return type(value)(hold(one, tensors) for one in value) if type(value) in (list, tuple) else value


def place(value):
    "A result with tensors of the device."
    if isinstance(value, torch.Tensor):
        return DeviceTensor(value.resolve_conj().resolve_neg())
    return type(value)(place(one) for one in value) if type(value) in (list, tuple) else value


class Watch:
    "A mode of torch that counts for a device."
    def __init__(self, device):
        super().__init__()
        self.device = device


class Operations(Watch, TorchDispatchMode):
    "Computes the operations of the pretend device, and counts them."
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        (name, free, sized, written), tensors = traits(func), []
        operands = [hold(one, tensors) for one in args]
        options = {key: hold(one, tensors) for key, one in kwargs.items()} if kwargs else {}
        here = any(isinstance(one, DeviceTensor) for one in tensors)
        wanted = options.get("device")
        target = torch.device(wanted) if wanted is not None else META if here else CPU
        if here:
            self.check(name, args, tensors)
        if here or target == META:
            waits = here and (target == CPU or (asks_for_size(args) if name in TAKES_HOST_INDICES else sized))
            self.device.waits += waits
            self.device.launches += not waits and not free
            self.device.uploads += target == META and any(one.ndim and not isinstance(one, DeviceTensor) for one in tensors)
        if wanted is not None:
            options["device"] = CPU
        found = func(*operands, **options)
        if target != META:
            return found
        if not written:
            return place(found)
        changed = args[written[0][0]] if written[0][0] < len(args) else kwargs[written[0][1]]
        every = changed if isinstance(changed, (list, tuple)) else [changed]
        assert all(one.shape == one.held.shape for one in every), f"{func} is not known to the pretend device"
        return changed if func._schema.returns else None

    @staticmethod
    def check(name, args, tensors):
        "Raise where a GPU would: operands on the CPU, unless they are scalars, indices or copied."
        strangers = [tuple(one.shape) for one in tensors if one.ndim and not isinstance(one, DeviceTensor)]
        if strangers and name in TAKES_HOST_INDICES and isinstance(args[0], DeviceTensor):
            strangers = [tuple(one.shape) for one in args[2:3] if one.ndim and not isinstance(one, DeviceTensor)]
        if strangers and name not in MAY_CROSS:
            raise RuntimeError(f"{name}: expected all tensors on one device, but {strangers} are on the CPU")


class HostCalls(Watch, TorchFunctionMode):
    "The calls that read or make the values of a tensor without an operation."
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.tolist and isinstance(args[0], DeviceTensor):
            self.device.waits += 1
            return args[0].held.tolist()
        if func is torch.Tensor.numpy and isinstance(args[0], DeviceTensor):
            raise TypeError("cannot convert a tensor of another device to numpy; copy it to the CPU first")
        if func in (torch.tensor, torch.Tensor.new_tensor):
            like = args[0] if func is torch.Tensor.new_tensor else None
            wanted = kwargs.get("device") or (like.device if like is not None else CPU)
            if torch.device(wanted) == META:
                self.device.launches += 1                      # the copy from the CPU
                self.device.uploads += 1
                data = args[0] if like is None else args[1]
                dtype = kwargs.get("dtype") or (like.dtype if like is not None else None)
                return DeviceTensor(torch.tensor(data, dtype=dtype)).requires_grad_(kwargs.get("requires_grad", False))
        return func(*args, **kwargs)


class DeviceAutocast(torch.autocast):
    "The pretend device has the autocast of the CPU; torch knows none for its name."
    def __init__(self, device_type, *args, **kwargs):
        super().__init__("cpu" if device_type == META.type else device_type, *args, **kwargs)


class PretendDevice:
    "Within it, tensors that `upload` made compute; `launches`, `waits` and `uploads` count."
    def __init__(self):
        self.launches = self.waits = self.uploads = 0
        self.modes = HostCalls(self), Operations(self)

    def __enter__(self):
        self.autocast, torch.autocast = torch.autocast, DeviceAutocast
        for mode in self.modes:
            mode.__enter__()
        return self

    def __exit__(self, *error):
        for mode in reversed(self.modes):
            mode.__exit__(*error)
        torch.autocast = self.autocast

    @staticmethod
    def upload(value):
        "A tensor, or a module's parameters and buffers, as they are on the device; not counted."
        if isinstance(value, torch.Tensor):
            return DeviceTensor(value.detach().clone())
        for part in value.modules():
            for name, one in part._parameters.items():
                if one is not None:
                    part._parameters[name] = torch.nn.Parameter(DeviceTensor(one.detach()), one.requires_grad)
            for name, one in part._buffers.items():
                if one is not None:
                    part._buffers[name] = DeviceTensor(one)
        return value

    @staticmethod
    def download(tensor):
        "The values of a tensor; not counted."
        return tensor.detach().held if isinstance(tensor, DeviceTensor) else torch.as_tensor(tensor).detach()
