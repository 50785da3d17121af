// linalg/fourier.cu: y[o, f, k, i] = SCALE sum over j of x[o, f step + j, i] e^(SIGN 2 pi i jk / POINTS) (DFT, STFT).
// Idea     : ROWS transforms a block. A stage of radix 8, 4, 2, 3 or 5 takes each thread's points to registers
//            and back to shared memory (Stockham's order: no bits are reversed); the first stage reads x, the
//            last writes y. One slot in nine stays empty, so that strides of 8 meet no bank twice.
// Inputs   : x T [outer, length, inner, PARTS], of which `taken` elements count, the rest being 0; window T [POINTS];
//            table f64 [POINTS, 2], the roots e^(SIGN 2 pi i k / POINTS).
// Output   : y T [outer, frames, RESULTS, inner, OUT].
// Macros   : T POINTS ROWS BLOCK SIGN RESULTS; PARTS, OUT: 1 for real numbers, 2 for complex ones; ACROSS: neighbouring
//            threads have neighbouring rows in x and y; WINDOW; HALF: x is half of a symmetric spectrum.
// Launch   : a block for ROWS of the outer frames inner transforms.
// Numerics : in f64, rounded once at the end; a window's product is rounded to T before.
// Bound    : shared memory: each stage reads and writes 16 bytes a point, and 14 of the table.
#include "common.cuh"

struct alignas(16) Complex { double re, im; };
DEVICE Complex operator+(Complex a, Complex b) { return {a.re + b.re, a.im + b.im}; }
DEVICE Complex operator-(Complex a, Complex b) { return {a.re - b.re, a.im - b.im}; }
DEVICE Complex operator*(Complex a, Complex b) { return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
DEVICE Complex operator*(double s, Complex a) { return {s * a.re, s * a.im}; }
DEVICE Complex turned(Complex a) { return SIGN < 0 ? Complex{a.im, -a.re} : Complex{-a.im, a.re}; }  // SIGN i a

// v[k] = sum over j of v[j] e^(SIGN 2 pi i jk / R)
DEVICE void transform(Complex (&v)[1]) {}
DEVICE void transform(Complex (&v)[2]) {
    const Complex a = v[0];
    v[0] = a + v[1];
    v[1] = a - v[1];
}
DEVICE void transform(Complex (&v)[3]) {
    const Complex sum = v[1] + v[2], side = 0.86602540378443864676 * turned(v[1] - v[2]), middle = v[0] - 0.5 * sum;
    v[0] = v[0] + sum;
    v[1] = middle + side;
    v[2] = middle - side;
}
DEVICE void transform(Complex (&v)[4]) {
    const Complex a = v[0] + v[2], b = v[0] - v[2], c = v[1] + v[3], d = turned(v[1] - v[3]);
    v[0] = a + c;
    v[1] = b + d;
    v[2] = a - c;
    v[3] = b - d;
}
DEVICE void transform(Complex (&v)[5]) {
    const double c1 = 0.30901699437494742410, c2 = -0.80901699437494742410;
    const double s1 = 0.95105651629515357212, s2 = 0.58778525229247312917;
    const Complex a = v[1] + v[4], b = v[2] + v[3], c = v[1] - v[4], d = v[2] - v[3];
    const Complex p = v[0] + c1 * a + c2 * b, q = v[0] + c2 * a + c1 * b;
    const Complex e = turned(s1 * c + s2 * d), f = turned(s2 * c - s1 * d);
    v[0] = v[0] + a + b;
    v[1] = p + e;
    v[2] = q + f;
    v[3] = q - f;
    v[4] = p - e;
}
DEVICE void transform(Complex (&v)[8]) {
    const double r = 0.70710678118654752440;
    Complex a[4] = {v[0], v[2], v[4], v[6]}, b[4] = {v[1], v[3], v[5], v[7]};
    transform(a);
    transform(b);
    b[1] = r * (b[1] + turned(b[1]));
    b[2] = turned(b[2]);
    b[3] = r * (turned(b[3]) - b[3]);
    UNROLLED for (int k = 0; k < 4; k++) {
        v[k] = a[k] + b[k];
        v[k + 4] = a[k] - b[k];
    }
}

DEVICE i64 quotient(i64 a, i64 b) { return (a | b) >> 32 ? a / b : (u32)a / (u32)b; }

struct Ends {  // where the rows of a block stand in x and y
    const T* x;
    const T* window;
    T* y;
    i64 count, frames, inner, length, step;
    int taken;
    DEVICE void place(int row, i64& from, i64& to) const {  // -1: there is no such row
        const i64 at = (i64)blockIdx.x * ROWS + row, of = quotient(at, inner), i = at - of * inner;
        const i64 o = quotient(of, frames), f = of - o * frames;
        from = at < count ? (o * length + f * step) * inner + i : -1;
        to = of * RESULTS * inner + i;
    }
    DEVICE Complex read(i64 from, int j) const {
        if (from < 0 || j >= taken) return {0, 0};
        const Vec<T, PARTS> v = load<PARTS>(x + (from + j * inner) * PARTS);
        double part[2] = {};
        UNROLLED for (int p = 0; p < PARTS; p++)
            part[p] = widen(WINDOW ? narrow<T>(widen(v.at[p]) * widen(window[j])) : v.at[p]);
        const double weight = HALF && j && 2 * j != POINTS ? 2 : 1;  // the other half is the conjugate
        return weight * Complex{part[0], part[1]};
    }
    DEVICE void write(i64 to, int k, Complex z) const {
        if (k >= RESULTS) return;
        z = SIGN > 0 ? (1.0 / POINTS) * z : z;
        Vec<T, OUT> v;
        typedef typename Accumulator<T>::type A;
        v.at[0] = narrow<T>((A)z.re);
        if (OUT > 1) v.at[OUT - 1] = narrow<T>((A)z.im);
        store<OUT>(y + (to + k * inner) * OUT, v);
    }
};

DEVICE int slot(int row, int i) { return row * (POINTS + POINTS / 8 + 1) + i + i / 8; }

// The stages from the one on that joins transforms of DONE points.
template <int DONE> DEVICE void stages(const Ends& ends, const Complex* table, Complex* points) {
    constexpr int REST = POINTS / DONE;
    constexpr int ODD = REST == 1 ? 1 : REST % 3 == 0 ? 3 : 5, EVEN = REST % 4 ? 2 : REST % 8 || REST == 16 ? 4 : 8;
    constexpr int R = REST % 2 ? ODD : EVEN;
    constexpr int EACH = POINTS / R, ITEMS = ROWS * EACH, PER = (ITEMS + BLOCK - 1) / BLOCK;
    constexpr bool OPENS = DONE == 1, ENDS = DONE * R == POINTS;
    auto item = [](int p, int& row, int& j, bool across) {
        const int w = p * BLOCK + threadIdx.x;
        row = across ? w % ROWS : w / EACH;
        j = across ? w / ROWS : w % EACH;
        return ITEMS % BLOCK == 0 || w < ITEMS;
    };
    Complex v[PER][R];
    int row, j;
    i64 from, to;
    UNROLLED for (int p = 0; p < PER; p++) {
        if (!item(p, row, j, ACROSS && (OPENS || ENDS))) continue;
        if (OPENS) ends.place(row, from, to);
        UNROLLED for (int r = 0; r < R; r++) {
            v[p][r] = OPENS ? ends.read(from, j + r * EACH) : points[slot(row, j + r * EACH)];
            if (!OPENS && r) v[p][r] = v[p][r] * table[j % DONE * r * (POINTS / (DONE * R))];
        }
        transform(v[p]);
    }
    if (!OPENS && !ENDS) __syncthreads();  // all have read
    UNROLLED for (int p = 0; p < PER; p++) {
        if (!item(p, row, j, ACROSS && (OPENS || ENDS))) continue;
        if (ENDS) ends.place(row, from, to);
        UNROLLED for (int r = 0; r < R; r++) {
            const int k = j / DONE * DONE * R + j % DONE + r * DONE;
            if (!ENDS)
                points[slot(row, k)] = v[p][r];
            else if (from >= 0)
                ends.write(to, k, v[p][r]);
        }
    }
    if constexpr (!ENDS) {
        __syncthreads();
        stages<DONE * R>(ends, table, points);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    fourier(const T* x, const T* window, const Complex* table, T* y, i64 count, i64 frames, i64 inner, i64 length,
            i64 step, int taken) {
    after_previous_launch();
    extern __shared__ Complex points[];
    stages<1>({x, window, y, count, frames, inner, length, step, taken}, table, points);
}
