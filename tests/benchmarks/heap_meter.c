/* Live and peak malloc bytes of the process, exact, for LD_PRELOAD. Read through heap_live, heap_peak, heap_mark. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static _Atomic long live, peak;

static void *counted(void *p) {
  if (p) {
    long now = atomic_fetch_add(&live, (long)malloc_usable_size(p)) + (long)malloc_usable_size(p);
    long seen = atomic_load(&peak);
    while (now > seen && !atomic_compare_exchange_weak(&peak, &seen, now)) {}
  }
  return p;
}

void *malloc(size_t n) { return counted(__libc_malloc(n)); }
void *calloc(size_t n, size_t m) { return counted(__libc_calloc(n, m)); }
void *memalign(size_t a, size_t n) { return counted(__libc_memalign(a, n)); }
void *aligned_alloc(size_t a, size_t n) { return counted(__libc_memalign(a, n)); }
int posix_memalign(void **out, size_t a, size_t n) {
  void *p = counted(__libc_memalign(a, n));
  if (!p) return ENOMEM;
  *out = p;
  return 0;
}
void free(void *p) {
  if (p) atomic_fetch_sub(&live, (long)malloc_usable_size(p));
  __libc_free(p);
}
void *realloc(void *p, size_t n) {
  long before = p ? (long)malloc_usable_size(p) : 0;
  void *q = __libc_realloc(p, n);
  if (q || n == 0) atomic_fetch_sub(&live, before);
  return counted(q);
}

long heap_live(void) { return atomic_load(&live); }
long heap_peak(void) { return atomic_load(&peak); }
void heap_mark(void) { atomic_store(&peak, atomic_load(&live)); }
