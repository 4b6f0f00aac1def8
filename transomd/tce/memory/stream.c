/* Copying past the caches. The memory of a node is what bounds the copy of a checkpoint, and an ordinary store first
 * reads the line that it is about to overwrite: two reads and a write for each byte, where these stores need one of
 * each. They are SSE2's (MOVNTDQ), which every x86-64 processor has; wider ones are no faster.
 *
 * Built where a C compiler is there when transom is built (packaging/build_stream.py); move.py does without it.
 */

#include <emmintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LINE 64
#define AHEAD 1024 /* bytes that are fetched before they are needed */
#define PAGE 4096  /* of the program's tensors; where the next but one lies is looked up ahead, too: on a virtual
                    * machine that costs one thread a fifth of its time */

/* memcpy(3), except that what was copied is not in the caches afterwards. */
void transom_stream_copy(char *to, const char *from, size_t size)
{
    size_t head = -(uintptr_t)to % LINE;
    if (head > size)
        head = size;
    memcpy(to, from, head);
    to += head;
    from += head;
    size -= head;
    for (; size >= LINE; size -= LINE, to += LINE, from += LINE) {
        const __m128i *source = (const __m128i *)from;
        __m128i *target = (__m128i *)to;
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_prefetch(from + AHEAD, _MM_HINT_NTA);
        if (((uintptr_t)from & (PAGE - 1)) < LINE)
            _mm_prefetch(from + 2 * PAGE, _MM_HINT_NTA);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    memcpy(to, from, size);
    _mm_sfence(); /* before anybody is told that the copy is there */
}
