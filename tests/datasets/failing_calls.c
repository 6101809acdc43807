/* Preloaded into a process: counts the system calls below one folder, and makes the
 * n-th of them fail, end its process, or move half of the bytes it was asked to.
 *
 * What to do stands in a file that all processes of a run map (FAILING_CALLS names it),
 * so that workers count together with the process that started them, however they were
 * started.  See failing_calls.py for the other side.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { LOG_BYTES = 4 << 20 };
enum action { COUNT, FAIL, KILL, SHORT };

struct control {
    int64_t armed, action, error;
    int64_t first, last;            /* which calls it hits, counted from 1 */
    _Atomic int64_t count, hits, log_bytes;
    char folder[1024];
    char kinds[256];                /* " flock fsync "; empty for all */
    char refused[64];               /* " link ": as on another disk, and not counted */
    char log[LOG_BYTES];            /* one line a call: pid, kind, path */
};

static struct control *control;

__attribute__((constructor)) static void map_control(void) {
    const char *name = getenv("FAILING_CALLS");
    if (!name) return;
    int fd = syscall(SYS_openat, AT_FDCWD, name, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0) return;
    void *at = mmap(NULL, sizeof(struct control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    syscall(SYS_close, fd);
    if (at != MAP_FAILED) control = at;
}

static int is_below(const char *path) {
    size_t length = strlen(control->folder);
    return !strncmp(path, control->folder, length) &&
           (path[length] == '/' || path[length] == 0 || path[length] == ' ');
}

static void note(const char *kind, const char *path, const char *to) {
    char line[2300];
    int length = snprintf(line, sizeof line, "%d %s %s%s%s\n", getpid(), kind, path,
                          to ? " -> " : "", to ? to : "");
    int64_t at = atomic_fetch_add(&control->log_bytes, length);
    if (at + length < LOG_BYTES) memcpy(control->log + at, line, length);
}

/* Gives what to do with a call on a path: COUNT to let it pass. */
static enum action decide(const char *kind, const char *path, const char *to) {
    if (!control || !control->armed || !path || !(is_below(path) || (to && is_below(to))))
        return COUNT;
    char word[32];
    snprintf(word, sizeof word, " %s ", kind);
    if (strstr(control->refused, word)) {
        errno = EXDEV;
        return FAIL;
    }
    if (control->kinds[0] && !strstr(control->kinds, word)) return COUNT;
    int64_t number = atomic_fetch_add(&control->count, 1) + 1;
    note(kind, path, to);
    if (number < control->first || number > control->last) return COUNT;
    atomic_fetch_add(&control->hits, 1);
    if (control->action == KILL) {
        syscall(SYS_kill, getpid(), SIGKILL);
        for (;;) pause();
    }
    if (control->action == FAIL) errno = control->error;
    return control->action;
}

static const char *path_of(int fd, char *room, size_t size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    long length = syscall(SYS_readlink, link, room, size - 1);
    if (length < 0) return NULL;
    room[length] = 0;
    return room;
}

static enum action decide_fd(const char *kind, int fd) {
    if (!control || !control->armed) return COUNT;
    int before = errno;
    char room[1100];
    const char *path = path_of(fd, room, sizeof room);
    errno = before;
    return decide(kind, path, NULL);
}

static enum action decide_at(const char *kind, int folder, const char *name) {
    if (!control || !control->armed) return COUNT;
    if (!name || !*name) return decide_fd(kind, folder);
    if (*name == '/' || folder == AT_FDCWD) return decide(kind, name, NULL);
    char room[1100], path[2200];
    const char *base = path_of(folder, room, sizeof room);
    if (!base) return COUNT;
    snprintf(path, sizeof path, "%s/%s", base, name);
    return decide(kind, path, NULL);
}

#define NEXT(name) \
    static __typeof__(&name) next; \
    if (!next) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define BY_PATH(kind, type, failed, name, parameters, path, ...) \
    type name parameters { \
        NEXT(name); \
        if (decide(kind, path, NULL) == FAIL) return failed; \
        return next(__VA_ARGS__); \
    }
#define BY_FD(kind, type, failed, name, parameters, fd, ...) \
    type name parameters { \
        NEXT(name); \
        if (decide_fd(kind, fd) == FAIL) return failed; \
        return next(__VA_ARGS__); \
    }
#define BY_AT(kind, type, failed, name, parameters, folder, path, ...) \
    type name parameters { \
        NEXT(name); \
        if (decide_at(kind, folder, path) == FAIL) return failed; \
        return next(__VA_ARGS__); \
    }
/* Calls that may move fewer bytes than they were asked to. */
#define BY_BYTES(kind, name, parameters, ...) \
    ssize_t name parameters { \
        NEXT(name); \
        enum action action = decide_fd(kind, fd); \
        if (action == FAIL) return -1; \
        if (action == SHORT && size > 1) size /= 2; \
        return next(__VA_ARGS__); \
    }
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        NEXT(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        if (decide("open", path, NULL) == FAIL) return -1; \
        return next(path, flags, mode); \
    }
#define OPENAT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        NEXT(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); \
        va_end(rest); \
        if (decide_at("open", folder, path) == FAIL) return -1; \
        return next(folder, path, flags, mode); \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
BY_BYTES("read", read, (int fd, void *data, size_t size), fd, data, size)
BY_BYTES("read", pread, (int fd, void *data, size_t size, off_t at), fd, data, size, at)
BY_BYTES("read", pread64, (int fd, void *data, size_t size, off64_t at), fd, data, size, at)
BY_BYTES("write", write, (int fd, const void *data, size_t size), fd, data, size)
BY_BYTES("write", pwrite, (int fd, const void *data, size_t size, off_t at), fd, data, size, at)
BY_BYTES("write", pwrite64, (int fd, const void *data, size_t size, off64_t at), fd, data, size, at)
BY_FD("write", ssize_t, -1, writev, (int fd, const struct iovec *parts, int count), fd, fd, parts, count)
BY_FD("seek", off_t, -1, lseek, (int fd, off_t at, int whence), fd, fd, at, whence)
BY_FD("seek", off64_t, -1, lseek64, (int fd, off64_t at, int whence), fd, fd, at, whence)
BY_FD("fsync", int, -1, fsync, (int fd), fd, fd)
BY_FD("fsync", int, -1, fdatasync, (int fd), fd, fd)
BY_FD("truncate", int, -1, ftruncate, (int fd, off_t size), fd, fd, size)
BY_FD("truncate", int, -1, ftruncate64, (int fd, off64_t size), fd, fd, size)
BY_FD("flock", int, -1, flock, (int fd, int how), fd, fd, how)
BY_FD("chmod", int, -1, fchmod, (int fd, mode_t mode), fd, fd, mode)
BY_FD("stat", int, -1, fstat, (int fd, struct stat *to), fd, fd, to)
BY_FD("stat", int, -1, fstat64, (int fd, struct stat64 *to), fd, fd, to)
BY_FD("opendir", DIR *, NULL, fdopendir, (int fd), fd, fd)
BY_FD("readdir", struct dirent64 *, NULL, readdir64, (DIR *folder), dirfd(folder), folder)
BY_FD("readdir", struct dirent *, NULL, readdir, (DIR *folder), dirfd(folder), folder)
BY_FD("mmap", void *, MAP_FAILED, mmap64, (void *at, size_t size, int protect, int flags, int fd, off64_t from), fd, at, size, protect, flags, fd, from)
BY_FD("mmap", void *, MAP_FAILED, mmap, (void *at, size_t size, int protect, int flags, int fd, off_t from), fd, at, size, protect, flags, fd, from)
BY_PATH("stat", int, -1, stat, (const char *path, struct stat *to), path, path, to)
BY_PATH("stat", int, -1, stat64, (const char *path, struct stat64 *to), path, path, to)
BY_PATH("stat", int, -1, lstat, (const char *path, struct stat *to), path, path, to)
BY_PATH("stat", int, -1, lstat64, (const char *path, struct stat64 *to), path, path, to)
BY_AT("stat", int, -1, fstatat, (int folder, const char *path, struct stat *to, int flags), folder, path, folder, path, to, flags)
BY_AT("stat", int, -1, fstatat64, (int folder, const char *path, struct stat64 *to, int flags), folder, path, folder, path, to, flags)
BY_PATH("access", int, -1, access, (const char *path, int mode), path, path, mode)
BY_AT("access", int, -1, faccessat, (int folder, const char *path, int mode, int flags), folder, path, folder, path, mode, flags)
BY_PATH("opendir", DIR *, NULL, opendir, (const char *path), path, path)
BY_PATH("unlink", int, -1, unlink, (const char *path), path, path)
BY_AT("unlink", int, -1, unlinkat, (int folder, const char *path, int flags), folder, path, folder, path, flags)
BY_PATH("rmdir", int, -1, rmdir, (const char *path), path, path)
BY_PATH("mkdir", int, -1, mkdir, (const char *path, mode_t mode), path, path, mode)
BY_AT("mkdir", int, -1, mkdirat, (int folder, const char *path, mode_t mode), folder, path, folder, path, mode)
BY_PATH("chmod", int, -1, chmod, (const char *path, mode_t mode), path, path, mode)

int rename(const char *path, const char *to) {
    NEXT(rename);
    if (decide("rename", path, to) == FAIL) return -1;
    return next(path, to);
}

int link(const char *path, const char *to) {
    NEXT(link);
    if (decide("link", path, to) == FAIL) return -1;
    return next(path, to);
}

int close(int fd) {
    NEXT(close);
    if (decide_fd("close", fd) != FAIL) return next(fd);
    /* Linux closes the descriptor whatever it says of the last bytes. */
    int error = errno;
    next(fd);
    errno = error;
    return -1;
}
