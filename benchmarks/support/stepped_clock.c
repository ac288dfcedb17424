/* A CLOCK_MONOTONIC that can be stepped, for one process and its children:
 *   cc -O2 -shared -fPIC -o stepped_clock.so stepped_clock.c -ldl
 *   STEPPED_CLOCK=FILE LD_PRELOAD=./stepped_clock.so PROGRAM
 * FILE holds the step in nanoseconds, an int64_t; it is mapped, so a write counts at once. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *step_ns;
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("STEPPED_CLOCK");
    int fd = path ? open(path, O_RDONLY) : -1;
    real = dlsym(RTLD_NEXT, "clock_gettime");
    if (fd < 0) return;
    void *at = mmap(0, sizeof *step_ns, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (at != MAP_FAILED) step_ns = at;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = real(clock, now);
    if (result == 0 && clock == CLOCK_MONOTONIC && step_ns) {
        int64_t ns = now->tv_sec * INT64_C(1000000000) + now->tv_nsec + *step_ns;
        now->tv_sec = ns / 1000000000;
        now->tv_nsec = ns % 1000000000;
    }
    return result;
}
