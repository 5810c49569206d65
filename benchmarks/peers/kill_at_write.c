/* Kills a process at one of its operations on files below a directory, for LD_PRELOAD.
 *
 * STORM_DIR is that directory. STORM_CONTROL gets a line in operations.txt for each operation: rank,
 * process, number within the process, name, path. STORM_KILLS lists kills: the N-th is due if N files
 * killed-* exist when a process makes its first operation. "save:0:12" is a kill of rank 0 at its
 * operation 12: half of a write has been done then, and other operations have not.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pid_t counted;
static int number, due_rank, due_number, due_kill;

static void find_kill(const char *control) {
    char path[PATH_MAX], kills[4096];
    const char *given = getenv("STORM_KILLS");
    due_rank = due_number = -1;
    due_kill = 0;
    do {
        snprintf(path, sizeof path, "%s/killed-%d", control, due_kill);
    } while (access(path, F_OK) == 0 && ++due_kill);
    snprintf(kills, sizeof kills, "%s", given ? given : "");
    char *rest, *each = strtok_r(kills, ",", &rest);
    for (int i = 0; each && i < due_kill; i++)
        each = strtok_r(NULL, ",", &rest);
    if (each)
        sscanf(each, "save:%d:%d", &due_rank, &due_number);
}

/* Count an operation; return 1 if the process is to be killed at it. */
static int count(const char *name, const char *path) {
    const char *below = getenv("STORM_DIR"), *control = getenv("STORM_CONTROL"), *rank = getenv("RANK");
    if (!below || !control || !rank || strncmp(path, below, strlen(below)))
        return 0;
    pthread_mutex_lock(&lock);
    if (counted != getpid()) {
        counted = getpid();
        number = 0;
        find_kill(control);
    }
    char line[PATH_MAX + 64], file[PATH_MAX];
    int at = number++;
    int size = snprintf(line, sizeof line, "%s %d %d %s %s\n", rank, counted, at, name, path);
    snprintf(file, sizeof file, "%s/operations.txt", control);
    int log = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND, 0600);
    syscall(SYS_write, log, line, size);
    syscall(SYS_close, log);
    int due = at == due_number && atoi(rank) == due_rank;
    pthread_mutex_unlock(&lock);
    return due;
}

static void die(void) {
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/killed-%d", getenv("STORM_CONTROL"), due_kill);
    syscall(SYS_close, syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT, 0600));
    kill(getpid(), SIGKILL);
}

static int count_file(const char *name, int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size <= 0)
        return 0;
    path[size] = 0;
    return count(name, path);
}

static int count_path(const char *name, const char *path) {
    char full[PATH_MAX], here[PATH_MAX / 2];
    if (path[0] == '/')
        return count(name, path);
    if (!getcwd(here, sizeof here))
        return 0;
    snprintf(full, sizeof full, "%s/%s", here, path);
    return count(name, full);
}

ssize_t write(int file, const void *data, size_t size) {
    if (count_file("write", file)) {
        NEXT(write)(file, data, size / 2);
        die();
    }
    return NEXT(write)(file, data, size);
}

ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    if (count_file("write", file)) {
        NEXT(pwrite64)(file, data, size / 2, at);
        die();
    }
    return NEXT(pwrite64)(file, data, size, at);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    if (count_file("write", file)) {
        NEXT(writev)(file, parts, count / 2);
        die();
    }
    return NEXT(writev)(file, parts, count);
}

#define ON_FILE(name)                                                                                  \
    int name(int file) {                                                                               \
        if (count_file(#name, file))                                                                   \
            die();                                                                                     \
        return NEXT(name)(file);                                                                       \
    }

#define ON_PATH(name)                                                                                  \
    int name(const char *path) {                                                                       \
        if (count_path(#name, path))                                                                   \
            die();                                                                                     \
        return NEXT(name)(path);                                                                       \
    }

ON_FILE(fsync)
ON_FILE(fdatasync)
ON_PATH(unlink)
ON_PATH(rmdir)

int unlinkat(int folder, const char *path, int flags) {
    if (folder == AT_FDCWD ? count_path("unlink", path) : count_file("unlink", folder))
        die();
    return NEXT(unlinkat)(folder, path, flags);
}

int mkdir(const char *path, mode_t mode) {
    if (count_path("mkdir", path))
        die();
    return NEXT(mkdir)(path, mode);
}

int rename(const char *from, const char *to) {
    if (count_path("rename", to))
        die();
    return NEXT(rename)(from, to);
}

int link(const char *from, const char *to) {
    if (count_path("link", to))
        die();
    return NEXT(link)(from, to);
}
