/* A wall clock that is CLOCK_SHIFT seconds off, for one process and its children. Other clocks are left alone. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
    const char *text = getenv("CLOCK_SHIFT");
    return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    long code = syscall(SYS_clock_gettime, clock, now);
    if (code == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
    return (int)code;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec real;
    (void)zone;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &real);
    now->tv_sec = real.tv_sec + shift();
    now->tv_usec = real.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec real;
    syscall(SYS_clock_gettime, CLOCK_REALTIME, &real);
    if (where) *where = real.tv_sec + shift();
    return real.tv_sec + shift();
}

/* The kernel's clock is right: without this, a wait until a moment of the wrong one would end at once, or far too late.
   Seconds since 1970 are far more than those since the machine started. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    struct timespec real = *until;
    if (until->tv_sec < 1000000000) return pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, until);
    real.tv_sec -= shift();
    return pthread_cond_clockwait(condition, mutex, CLOCK_REALTIME, &real);
}
