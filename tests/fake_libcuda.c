// A CUDA driver that isn't there, as a library: what cuda.bindings finds in place of libcuda.so.1 where a test has it
// built. It keeps memory on the host and says what it is asked to launch, so that the real bindings are called.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef uint64_t Pointer;
static void *context = 0;

Result cuInit(unsigned flags) { return 0; }
Result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
Result cuDeviceGetCount(int *count) { *count = 1; return 0; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
Result cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Stub GPU"); return 0; }
Result cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 1ul << 30; return 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : attribute == 97 ? 227 * 1024 : -1;
    return *value < 0;
}
Result cuDevicePrimaryCtxRetain(void **made, int device) { *made = (void *)4096; return 0; }
Result cuCtxGetCurrent(void **current) { *current = context; return 0; }
Result cuCtxPushCurrent_v2(void *pushed) { context = pushed; return 0; }
Result cuCtxPopCurrent_v2(void **popped) { *popped = context; context = 0; return 0; }
Result cuCtxGetDevice(int *device) { *device = 0; return context ? 0 : 201; }
Result cuCtxSynchronize(void) { return context ? 0 : 201; }
Result cuGetErrorName(Result error, const char **name) { *name = "CUDA_ERROR_STUB"; return 0; }
Result cuGetErrorString(Result error, const char **text) { *text = "refused"; return 0; }

Result cuMemAlloc_v2(Pointer *made, size_t count) {
    if (!context) return 201;
    void *block = aligned_alloc(256, (count + 255) / 256 * 256);
    memset(block, 255, count);
    *made = (Pointer)block;
    return 0;
}
Result cuMemFree_v2(Pointer block) { free((void *)block); return context ? 0 : 201; }
Result cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t count, void *stream) {
    memcpy((void *)to, from, count);
    return context ? 0 : 201;
}
Result cuMemcpyDtoH_v2(void *to, Pointer from, size_t count) {
    memcpy(to, (void *)from, count);
    return context ? 0 : 201;
}
Result cuMemsetD8Async(Pointer to, unsigned char value, size_t count, void *stream) {
    memset((void *)to, value, count);
    return context ? 0 : 201;
}
Result cuPointerGetAttribute(void *value, int attribute, Pointer pointer) {
    *(int *)value = 0;
    return attribute != 9;
}
Result cuStreamSynchronize(void *stream) { printf("wait %lu\n", (uintptr_t)stream); return 0; }

Result cuLibraryLoadData(void **library, const void *code, void *jit, void *jit_values, unsigned jit_count, void *options,
                         void *option_values, unsigned option_count) {
    printf("load %.4s %u %u\n", (const char *)code + 1, jit_count, option_count);
    *library = (void *)1;
    return 0;
}
Result cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    printf("kernel %s\n", name);
    *kernel = (void *)2;
    return 0;
}
Result cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
    printf("attribute %d %d\n", attribute, value);
    return 0;
}
Result cuKernelGetFunction(void **function, void *kernel) { *function = (void *)3; return 0; }
Result cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                      unsigned shared, void *stream, void **parameters, void **extra) {
    if (parameters || (uintptr_t)extra[0] != 1 || (uintptr_t)extra[2] != 2 || extra[4] || !context) return 1;
    printf("launch %lu grid %u %u %u block %u %u %u shared %u stream %lu", (uintptr_t)function, x, y, z, tx, ty, tz, shared,
           (uintptr_t)stream);
    int64_t *words = extra[1];
    printf(" bytes %zu first %ld\n", *(size_t *)extra[3], words[0]);
    float *out = (float *)words[3];
    for (int i = 0; i < 4; i++) out[i] = i;
    return 0;
}

#define KNOWN(name) {#name, (void *)name}
#define VERSIONED(name) {#name, (void *)name##_v2}
static struct { const char *name; void *function; } known[] = {
    KNOWN(cuInit), KNOWN(cuDriverGetVersion), KNOWN(cuDeviceGetCount), KNOWN(cuDeviceGet), KNOWN(cuDeviceGetName),
    VERSIONED(cuDeviceTotalMem), KNOWN(cuDeviceGetAttribute), KNOWN(cuDevicePrimaryCtxRetain), KNOWN(cuCtxGetCurrent),
    VERSIONED(cuCtxPushCurrent), VERSIONED(cuCtxPopCurrent), KNOWN(cuCtxGetDevice), KNOWN(cuCtxSynchronize),
    KNOWN(cuGetErrorName), KNOWN(cuGetErrorString), VERSIONED(cuMemAlloc), VERSIONED(cuMemFree),
    VERSIONED(cuMemcpyHtoDAsync), VERSIONED(cuMemcpyDtoH), KNOWN(cuMemsetD8Async), KNOWN(cuPointerGetAttribute),
    KNOWN(cuStreamSynchronize), KNOWN(cuLibraryLoadData), KNOWN(cuLibraryGetKernel), KNOWN(cuKernelSetAttribute),
    KNOWN(cuKernelGetFunction), KNOWN(cuLaunchKernel),
};
Result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    *function = 0;
    for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(name, known[i].name)) *function = known[i].function;
    if (status) *status = !*function;
    return *function ? 0 : 500;
}
