/* An Ascend runtime without a device: what torch_npu asks of it when it is imported, allocates, copies and orders work.
 *
 * Device memory is host memory and a copy is done when it is asked for. Streams and events only have numbers, and what is
 * done with them is written down (`stub_log`), because the order of those calls is what tests are after. Captures begin and
 * end but hold nothing. Kernels do not run here: tests compute above torch_npu (executor.py).
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, NO_MEMORY = 207001, NO_COMPUTE = 500001 };
#define TAKES_ANYTHING(name) long name() { return OK; }

/* ---- the log ---------------------------------------------------------------------------------------------------------- */

static char lines[1 << 20];
static size_t used;
static int recording;

void stub_note(const char *line) {
    size_t length = strlen(line);
    if (!recording) return;
    if (used + length + 2 > sizeof lines) abort();
    memcpy(lines + used, line, length);
    used += length;
    lines[used++] = '\n';
    lines[used] = 0;
}
void stub_record(void) { recording = 1; lines[used = 0] = 0; }
const char *stub_log(void) { recording = 0; return lines; }

typedef struct { int number; } Handle;
static int num_streams, num_events, num_graphs;

static Handle *numbered(int *count) {
    Handle *handle = malloc(sizeof *handle);
    handle->number = (*count)++;
    return handle;
}
static int number(const Handle *handle) { return handle ? handle->number : -1; }
static void note(const char *format, const void *a, const void *b) {
    char line[96];
    snprintf(line, sizeof line, format, number(a), number(b));
    stub_note(line);
}
/* The runtime's own number of a stream, as it stands in the log. */
int stub_number(const Handle *stream) { return number(stream); }

/* ---- devices ---------------------------------------------------------------------------------------------------------- */

static int current_device, context;
static const char *setting(const char *name, const char *otherwise) {
    const char *value = getenv(name);
    return value ? value : otherwise;
}
int aclrtGetDeviceCount(uint32_t *n) { *n = atoi(setting("STUB_NPU_COUNT", "1")); return OK; }
int aclrtSetDevice(int device) { current_device = device; return OK; }
int aclrtGetDevice(int *device) { *device = current_device; return OK; }
const char *aclrtGetSocName(void) { return setting("STUB_NPU_NAME", "Ascend910B3"); }
int aclrtGetCurrentContext(void **c) { *c = &context; return OK; }
int aclrtGetMemInfo(int kind, size_t *free, size_t *total) {
    *free = *total = (size_t)atoi(setting("STUB_NPU_GB", "64")) << 30;
    return OK;
}
int aclrtDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return OK; }
int aclGetDeviceCapability(uint32_t device, int kind, int64_t *value) { *value = 0; return OK; }
int aclrtGetDeviceInfo(uint32_t device, int kind, int64_t *value) { *value = 20; return OK; }
int aclrtDeviceGetBareTgid(int *pid) { *pid = 1; return OK; }
int aclrtDeviceGetStreamPriorityRange(int *low, int *high) { *low = *high = 0; return OK; }
int aclrtGetSysParamOpt(int kind, int64_t *value) { if (value) *value = 0; return OK; }
int aclrtCtxGetSysParamOpt(int kind, int64_t *value) { if (value) *value = 0; return OK; }
const char *aclGetRecentErrMsg(void) { return "the stub runtime computes nothing"; }
size_t aclGetCompileoptSize(int kind) { return 256; }
int aclGetCompileopt(int kind, char *value, size_t size) { if (value && size) value[0] = 0; return OK; }

/* ---- memory ----------------------------------------------------------------------------------------------------------- */

static int take(void **p, size_t n) { return posix_memalign(p, 512, n ? n : 512) ? NO_MEMORY : OK; }
int aclrtMalloc(void **p, size_t n, int policy) { return take(p, n); }
int aclrtMallocAlign32(void **p, size_t n, int policy) { return take(p, n); }
int aclrtMallocHost(void **p, size_t n) { return take(p, n); }
int aclrtMallocHostWithCfg(void **p, size_t n, void *config) { return take(p, n); }
int aclrtFree(void *p) { free(p); return OK; }
int aclrtFreeHost(void *p) { free(p); return OK; }
int aclrtMemcpy(void *to, size_t room, const void *from, size_t n, int kind) { memmove(to, from, n); return OK; }
int aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t n, int kind, void *stream) {
    memmove(to, from, n);
    return OK;
}
int aclrtMemset(void *p, size_t room, int value, size_t n) { memset(p, value, n); return OK; }
int aclrtMemsetAsync(void *p, size_t room, int value, size_t n, void *stream) { memset(p, value, n); return OK; }

/* ---- streams and events ----------------------------------------------------------------------------------------------- */

int aclrtCreateStream(void **s) { *s = numbered(&num_streams); return OK; }
int aclrtCreateStreamWithConfig(void **s, uint32_t priority, uint32_t flags) { return aclrtCreateStream(s); }
int aclrtDestroyStream(void *s) { free(s); return OK; }
int aclrtDestroyStreamForce(void *s) { free(s); return OK; }
int aclrtStreamQuery(void *s, int *status) { *status = 0; return OK; }
int aclrtStreamGetId(void *s, int *id) { *id = number(s); return OK; }
int aclrtSynchronizeStream(void *s) { note("synchronize stream %d", s, 0); return OK; }
int aclrtSynchronizeStreamWithTimeout(void *s, int timeout) { return aclrtSynchronizeStream(s); }
int aclrtCreateEventExWithFlag(void **e, uint32_t flag) { *e = numbered(&num_events); return OK; }
int aclrtCreateEventWithFlag(void **e, uint32_t flag) { *e = numbered(&num_events); return OK; }
int aclrtDestroyEvent(void *e) { free(e); return OK; }
int aclrtRecordEvent(void *e, void *s) { note("event %d on stream %d", e, s); return OK; }
int aclrtStreamWaitEvent(void *s, void *e) { note("stream %d waits for event %d", s, e); return OK; }
int aclrtSynchronizeEvent(void *e) { note("synchronize event %d", e, 0); return OK; }
int aclrtQueryEventStatus(void *e, int *status) { *status = 1; return OK; }
int aclrtQueryEventWaitStatus(void *e, int *status) { *status = 1; return OK; }
int aclrtEventElapsedTime(float *ms, void *a, void *b) { *ms = 0; return OK; }

/* ---- captures --------------------------------------------------------------------------------------------------------- */

static Handle *capturing;
int aclmdlRICaptureBegin(void *s, int mode) {
    capturing = numbered(&num_graphs);
    note("capture %d begins on stream %d", capturing, s);
    return OK;
}
int aclmdlRICaptureGetInfo(void *s, int *status, void **graph) {
    *status = capturing != 0;
    if (graph) *graph = capturing;
    return OK;
}
int aclmdlRICaptureEnd(void *s, void **graph) {
    note("capture %d ends on stream %d", capturing, s);
    *graph = capturing;
    capturing = 0;
    return OK;
}
int aclmdlRIExecuteAsync(void *graph, void *s) { note("replay %d on stream %d", graph, s); return OK; }
int aclmdlRIDestroy(void *graph) { free(graph); return OK; }

/* ---- kernels: there are none ------------------------------------------------------------------------------------------ */

static char anything[4096];
void *aclCreateTensorDesc(int type, int n, const int64_t *sizes, int format) { return anything; }
void *aclCreateDataBuffer(void *p, size_t n) { return anything; }
void *aclopCreateAttr(void) { return anything; }
long aclopCompileAndExecute() { return NO_COMPUTE; }

TAKES_ANYTHING(aclInit) TAKES_ANYTHING(aclFinalize) TAKES_ANYTHING(aclAppLog)
TAKES_ANYTHING(aclrtResetDevice) TAKES_ANYTHING(aclrtSetCurrentContext) TAKES_ANYTHING(aclrtResetEvent)
TAKES_ANYTHING(aclrtSynchronizeDevice) TAKES_ANYTHING(aclrtSynchronizeDeviceWithTimeout)
TAKES_ANYTHING(aclrtSetSysParamOpt) TAKES_ANYTHING(aclrtCtxSetSysParamOpt) TAKES_ANYTHING(aclSetCompileopt)
TAKES_ANYTHING(aclrtSetDeviceSatMode) TAKES_ANYTHING(aclrtSetStreamOverflowSwitch) TAKES_ANYTHING(aclrtSetOpExecuteTimeOut)
TAKES_ANYTHING(aclmdlRICaptureThreadExchangeMode) TAKES_ANYTHING(aclrtDeviceEnablePeerAccess)
TAKES_ANYTHING(aclDestroyTensorDesc) TAKES_ANYTHING(aclDestroyDataBuffer) TAKES_ANYTHING(aclopDestroyAttr)
TAKES_ANYTHING(aclGetTensorDescDimV2) TAKES_ANYTHING(aclGetTensorDescFormat) TAKES_ANYTHING(aclGetTensorDescNumDims)
TAKES_ANYTHING(aclGetTensorDescType) TAKES_ANYTHING(aclSetTensorDescName) TAKES_ANYTHING(aclSetTensorFormat)
TAKES_ANYTHING(aclSetTensorPlaceMent) TAKES_ANYTHING(aclSetTensorShape)
TAKES_ANYTHING(aclopSetAttrBool) TAKES_ANYTHING(aclopSetAttrDataType) TAKES_ANYTHING(aclopSetAttrFloat)
TAKES_ANYTHING(aclopSetAttrInt) TAKES_ANYTHING(aclopSetAttrListBool) TAKES_ANYTHING(aclopSetAttrListFloat)
TAKES_ANYTHING(aclopSetAttrListInt) TAKES_ANYTHING(aclopSetAttrListListInt) TAKES_ANYTHING(aclopSetAttrString)
TAKES_ANYTHING(aclmdlInitDump) TAKES_ANYTHING(aclmdlSetDump) TAKES_ANYTHING(aclmdlFinalizeDump)
TAKES_ANYTHING(aclrtBinaryGetFunction) TAKES_ANYTHING(aclrtBinaryLoadFromData) TAKES_ANYTHING(aclrtGetFunctionAddr)
TAKES_ANYTHING(aclrtMallocPhysical) TAKES_ANYTHING(aclrtFreePhysical) TAKES_ANYTHING(aclrtMapMem)
TAKES_ANYTHING(aclrtUnmapMem) TAKES_ANYTHING(aclrtReserveMemAddress) TAKES_ANYTHING(aclrtReleaseMemAddress)
TAKES_ANYTHING(aclrtMemExportToShareableHandle) TAKES_ANYTHING(aclrtMemImportFromShareableHandle)
TAKES_ANYTHING(aclrtMemSetPidToShareableHandle) TAKES_ANYTHING(aclrtProcessReport)
TAKES_ANYTHING(rtDevBinaryRegister) TAKES_ANYTHING(rtFunctionRegister) TAKES_ANYTHING(rtGetC2cCtrlAddr)
TAKES_ANYTHING(rtKernelLaunch) TAKES_ANYTHING(MsprofGetHashId) TAKES_ANYTHING(MsprofRegisterCallback)
TAKES_ANYTHING(MsprofReportAdditionalInfo) TAKES_ANYTHING(MsprofReportApi) TAKES_ANYTHING(MsprofReportCompactInfo)
TAKES_ANYTHING(MsprofSysCycleTime)
