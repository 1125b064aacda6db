// What torch asks of a GPU before it computes anything there: devices, streams, events. This one has them, and no memory.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::Stream;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Device device() { return Device(DeviceType::CUDA, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, device()); }

  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return device(); }
  Device exchangeDevice(Device) const override { return device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream exchangeStream(Stream) const override { return stream(); }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  bool queryEvent(void*) const override { return false; }  // all is still on its way
};

}  // namespace

namespace at {

struct CUDAHooks : CUDAHooksInterface {  // torch looks for it by this name
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
