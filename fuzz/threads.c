/* GOMP_parallel on threads that the thread sanitizer sees: it knows pthread_create and
 * pthread_join, and not what the OpenMP runtime of torch, which is built without it, does. */
#include <pthread.h>

struct call {
    void (*task)(void *);
    void *job;
};

static void *start(void *argument) {
    const struct call *c = argument;
    c->task(c->job);
    return NULL;
}

void fork_threads(void (*task)(void *), void *job, unsigned threads, unsigned flags) {
    struct call c = {task, job};
    pthread_t started[64];
    unsigned count = 0;
    (void)flags;
    while (count + 1 < threads && count < 64)
        if (pthread_create(&started[count], NULL, start, &c) != 0) break;
        else count++;
    task(job);
    for (unsigned i = 0; i < count; i++) pthread_join(started[i], NULL);
}
