"""How busy an NVIDIA GPU is, by NVML's counters (GPM: Hopper and later), which slow nothing down.

`nvidia-smi`'s utilization will not do: its windows are its own, and a tiny kernel counts like a full device.
"""

from ctypes import CDLL, byref, c_uint, c_void_p, create_string_buffer
from struct import Struct

_HEAD, _METRIC = Struct("IIPP"), Struct("Iid3P")
"""nvmlGpmMetricsGet_t: version, count, two samples, then metrics: number, error, percent, three texts."""


class Activity:
    """Counters of the machine's first GPU. `trouble` says why there are none."""

    def __init__(self) -> None:
        self._device, self._samples, self.trouble = c_void_p(), [c_void_p(), c_void_p()], ""
        try:
            self._nvml = CDLL("libnvidia-ml.so.1")
            self._call("Init_v2")
            self._call("DeviceGetHandleByIndex_v2", c_uint(0), byref(self._device))
            for sample in self._samples:
                self._call("GpmSampleAlloc", byref(sample))
                self._call("GpmSampleGet", self._device, sample)
        except OSError as error:
            self.trouble = f"how busy the device is, is unknown: {error}"

    def shares(self) -> tuple[float, ...]:
        """Return since the last call: the share of time in which any kernel ran, and the share of
        multiprocessors that had work, averaged over time. Zeros if unknown: after under 0.1 s, too."""
        self._samples.reverse()
        asked = _HEAD.pack(1, 2, *(each.value or 0 for each in self._samples))
        asked += b"".join(_METRIC.pack(number, 0, 0.0, 0, 0, 0) for number in (1, 2))
        told = create_string_buffer(asked, 1 << 16)  # has room for the metrics of any NVML
        try:
            self._call("GpmSampleGet", self._device, self._samples[1])
            self._call("GpmMetricsGet", told)
        except OSError:
            return 0.0, 0.0
        metrics = (_METRIC.unpack_from(told, _HEAD.size + at * _METRIC.size) for at in range(2))
        return tuple(0.0 if error else percent / 100 for _, error, percent, *_ in metrics)

    def _call(self, name: str, *arguments: object) -> None:
        if self.trouble or (error := getattr(self._nvml, f"nvml{name}")(*arguments)):
            raise OSError(self.trouble or f"nvml{name} failed with {error}")
